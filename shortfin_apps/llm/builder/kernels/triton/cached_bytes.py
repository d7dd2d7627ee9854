"""KV cache rows in bytes: the elements of all heads, then an f32 scale for each head.

A byte is the element divided by the head's scale, rounded to even. The scale is the head's largest magnitude
/ 127. Magnitudes are compared as integers, which order as floats do and put NaN last; a head that contains
NaN gets a scale of NaN and reads as all NaN. The remainder of a row is padding.
"""

import triton
import triton.language as tl

MOST = tl.constexpr(127)
# 1.5 * 2^23: adding this rounds a float to an integer; the lowest byte of the sum is its two's complement.
TO_INTEGER = tl.constexpr(12582912.0)
NO_SIGN = tl.constexpr(0x7FFFFFFF)
SCALE_BYTES = tl.constexpr(4)


@triton.jit
def scales_of(cache, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the address of the scales in cache row 0.

    The scales of row r are r * ROW / SCALE_BYTES elements after.
    """
    return (cache + KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_scales(scales, row, exists, ROW: tl.constexpr):
    """Load the scales of one head in the cache rows `row` [COLUMNS], as f32; 0 for rows that do not exist."""
    at = scales + row * (ROW // SCALE_BYTES)
    return tl.load(at, mask=exists, other=None if exists is None else 0.0)


@triton.jit
def quantised_pairs(low, high, inside, HEAD_PAIRS: tl.constexpr):
    """Quantise whole heads to bytes: the pairs of elements `low` and `high` [ROWS, PAIRS] f32.

    A head has HEAD_PAIRS pairs. Also returns the scale of each pair's head, [ROWS, PAIRS] f32. Pairs that
    are not `inside` are ignored.
    """
    ROWS: tl.constexpr = low.shape[0]
    PAIRS: tl.constexpr = low.shape[1]
    HEADS: tl.constexpr = PAIRS // HEAD_PAIRS
    larger = tl.where(inside, tl.maximum(magnitude(low), magnitude(high)), 0)
    largest = tl.max(tl.reshape(larger, (ROWS, HEADS, HEAD_PAIRS)), axis=2)
    of_pair = tl.broadcast_to(scale_for(largest)[:, :, None], (ROWS, HEADS, HEAD_PAIRS))
    scale = tl.reshape(of_pair, (ROWS, PAIRS))
    return rounded(low / scale), rounded(high / scale), scale


@triton.jit
def magnitude(x):
    """Return the bits of |x|, as i32."""
    return x.to(tl.int32, bitcast=True) & NO_SIGN


@triton.jit
def scale_for(largest):
    """Return the scale of a head with this largest `magnitude`."""
    return largest.to(tl.float32, bitcast=True) / MOST


@triton.jit
def rounded(x):
    """Round x, which must be from -127 to 127, to an i8."""
    return (x + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantised_row(first, low, high, in_first, in_half):
    """Quantise a single head whose elements are `first`, `low` and `high` to bytes; also return its scale.

    Elements that are not `in_first`, or not `in_half` for `low` and `high`, are ignored.
    """
    of_first = tl.max(tl.where(in_first, magnitude(first), 0), axis=0)
    of_halves = tl.max(tl.where(in_half, tl.maximum(magnitude(low), magnitude(high)), 0), axis=0)
    scale = scale_for(tl.maximum(of_first, of_halves))
    return rounded(first / scale), rounded(low / scale), rounded(high / scale), scale
