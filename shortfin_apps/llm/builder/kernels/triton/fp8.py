"""Products of 8-bit floats (E4M3): weights with a scale for each output feature, activations quantised here.

Of a row of activations, FP8_GROUP neighbours along K share a scale: a power of two that brings the largest
magnitude among them near the format's largest number. Scaling by a power of two rounds nothing, so that a
host gets the same quants to the bit.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels import triton as rooms

FP8_GROUP = tl.constexpr(rooms.FP8_GROUP)
# Of the largest magnitude: 2^7 to 2^8 in OCP's format, whose largest number is 448; half of that in gfx942's
# ("fnuz"), whose largest is 240.
TOP_EXPONENT = tl.constexpr(7)
TOP_EXPONENT_FNUZ = tl.constexpr(6)
BIAS = tl.constexpr(127)  # of an f32's exponent
MANTISSA_BITS = tl.constexpr(23)


@triton.jit
def fp8_product(x, w, scales, row, tokens, weight_row, IN: tl.constexpr, DEPTH: tl.constexpr):
    """As `product` (product.py), of a w in 8-bit floats with `scales` [..] f32 for its rows."""
    tl.static_assert(DEPTH == FP8_GROUP)
    own = tl.minimum(row, tokens - 1)
    exists = (row < tokens)[:, None]
    k = tl.arange(0, DEPTH)
    x_tile = x + own[:, None].to(tl.int64) * IN + k[None, :]
    w_tile = w + weight_row[None, :].to(tl.int64) * IN + k[:, None]
    sums = tl.zeros((row.shape[0], weight_row.shape[0]), tl.float32)
    for first in range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            a = tl.load(x_tile, mask=exists, other=0.0)
            b = tl.load(w_tile)
        else:
            inside = first + k < IN
            a = tl.load(x_tile, mask=exists & inside[None, :], other=0.0)
            b = tl.load(w_tile, mask=inside[:, None], other=0.0)
        quants, scale = quantised(a, w.dtype.element_ty)
        part = tl.dot(quants, b)
        sums = tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), sums)
        x_tile += DEPTH
        w_tile += DEPTH
    return sums * tl.load(scales + weight_row)[None, :]


@triton.jit
def quantised(x, dtype: tl.constexpr):
    """x [ROWS, FP8_GROUP] as `dtype`, and the scales [ROWS] f32 of its rows."""
    TOP: tl.constexpr = TOP_EXPONENT_FNUZ if dtype == tl.float8e4b8 else TOP_EXPONENT
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)
    exponent = largest.to(tl.int32, bitcast=True) >> MANTISSA_BITS
    # Both factors have to be normal numbers.
    power = tl.minimum(tl.maximum(exponent - TOP, 1), 2 * BIAS - 1)
    scale = (power << MANTISSA_BITS).to(tl.float32, bitcast=True)
    inverse = ((2 * BIAS - power) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(dtype), scale
