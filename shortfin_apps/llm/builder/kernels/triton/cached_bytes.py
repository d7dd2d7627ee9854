"""Rows of the KV cache in bytes: their heads, and behind all of these an f32 scale for each.

A byte is the element over the head's scale, rounded to even; the scale is the head's largest magnitude / 127.
Magnitudes are compared as integers, which order as floats do and put NaN last: a head that has NaN gets a
scale of NaN, so that all of it reads as NaN. The rest of a row is padding.
"""

import triton
import triton.language as tl

MOST = tl.constexpr(127)
# 1.5 * 2^23: what is added to it is rounded to an integer, whose two's complement is the sum's lowest byte.
TO_INTEGER = tl.constexpr(12582912.0)
NO_SIGN = tl.constexpr(0x7FFFFFFF)
SCALE_BYTES = tl.constexpr(4)


@triton.jit
def scales_of(cache, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the scales of the cache's first row are; those of row r lie r * ROW / SCALE_BYTES behind them."""
    return (cache + KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_scales(scales, row, exists, ROW: tl.constexpr):
    """[COLUMNS] f32: the scales of one head in the rows `row` [COLUMNS], 0 for those that do not exist."""
    at = scales + row * (ROW // SCALE_BYTES)
    return tl.load(at, mask=exists, other=None if exists is None else 0.0)


@triton.jit
def quantised_pairs(low, high, inside, HEAD_PAIRS: tl.constexpr):
    """The bytes of the pairs `low` and `high` [ROWS, PAIRS] f32 of whole heads, HEAD_PAIRS of each, and the
    scale [ROWS, PAIRS] f32 of each pair's head. Pairs that are not `inside` count for nothing.
    """
    ROWS: tl.constexpr = low.shape[0]
    PAIRS: tl.constexpr = low.shape[1]
    HEADS: tl.constexpr = PAIRS // HEAD_PAIRS
    larger = tl.where(inside, tl.maximum(_magnitude(low), _magnitude(high)), 0)
    largest = tl.max(tl.reshape(larger, (ROWS, HEADS, HEAD_PAIRS)), axis=2)
    of_head = largest.to(tl.float32, bitcast=True) / MOST
    of_pair = tl.broadcast_to(of_head[:, :, None], (ROWS, HEADS, HEAD_PAIRS))
    scale = tl.reshape(of_pair, (ROWS, PAIRS))
    return _rounded(low / scale), _rounded(high / scale), scale


@triton.jit
def _magnitude(x):
    """The bits of |x|."""
    return x.to(tl.int32, bitcast=True) & NO_SIGN


@triton.jit
def _rounded(x):
    """x as a byte, where it is from -127 to 127."""
    return (x + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
