"""Products of 8-bit floats (E4M3): weights with a scale per output feature, and quantised activations.

In a row of activations, FP8_GROUP neighbours along K share a scale: a power of two that brings their largest
magnitude near the format's largest value. Scaling by a power of two does not round, so a host can compute
the same quants bit for bit.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels import triton as rooms
from shortfin_apps.llm.builder.kernels.triton.parts import parts_product, sum_of_parts

FP8_GROUP = tl.constexpr(rooms.FP8_GROUP)
# Exponent of a group's largest magnitude after scaling: the magnitude is from 2^7 to 2^8 in OCP's format,
# whose largest value is 448, and from 2^6 to 2^7 in gfx942's ("fnuz"), whose largest value is 240.
TOP_EXPONENT = tl.constexpr(7)
TOP_EXPONENT_FNUZ = tl.constexpr(6)
BIAS = tl.constexpr(127)  # bias of an f32's exponent
MANTISSA_BITS = tl.constexpr(23)


@triton.jit
def quantise(x, quants, scales, tokens, IN: tl.constexpr, ROWS: tl.constexpr):
    """Quantise x [tokens, IN] to `quants` [tokens, IN] and `scales` [tokens, IN / FP8_GROUP] f32.

    A workgroup handles FP8_GROUP neighbours of ROWS tokens.
    """
    quantise_tile(tl.program_id(0) * ROWS, tl.program_id(1), x, quants, scales, tokens, IN, ROWS)


@triton.jit
def quantise_tile(first_row, group, x, quants, scales, tokens, IN: tl.constexpr, ROWS: tl.constexpr):
    """Compute the `group`-th group of ROWS tokens of `quantise`, from the token `first_row` on."""
    GROUPS: tl.constexpr = (IN + FP8_GROUP - 1) // FP8_GROUP
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    k = group * FP8_GROUP + tl.arange(0, FP8_GROUP)
    at = row[:, None] * IN + k[None, :]
    inside = (row < tokens)[:, None] & (k < IN)[None, :]
    rounded, scale = quantised(tl.load(x + at, mask=inside, other=0.0), quants.dtype.element_ty)
    tl.store(quants + at, rounded, mask=inside)
    tl.store(scales + row * GROUPS + group, scale, mask=row < tokens)


@triton.jit
def fp8_product(
    x,
    x_scales,
    w,
    scales,
    row,
    tokens,
    weight_row,
    IN: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute `product` (product.py) for x and w in 8-bit floats.

    `x_scales` [tokens, IN / FP8_GROUP] f32 are the scales of x, `scales` [..] f32 of the rows of w.
    DEPTH must be a multiple of FP8_GROUP; with PARTS > 1, which take a group in turns, it must be PARTS *
    FP8_GROUP.
    """
    if PARTS == 1:
        sums = _sums_of_groups(x, x_scales, w, row, tokens, weight_row, IN, DEPTH, STAGES)
    else:
        sums = _sums_of_parts(x, x_scales, w, row, tokens, weight_row, IN, PARTS, STAGES)
    return sums * tl.load(scales + weight_row)[None, :]


@triton.jit
def _sums_of_parts(
    x, x_scales, w, row, tokens, weight_row, IN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr
):
    """Return the sums [ROWS, COLUMNS], computed by PARTS waves."""
    DEPTH: tl.constexpr = PARTS * FP8_GROUP
    GROUPS: tl.constexpr = (IN + FP8_GROUP - 1) // FP8_GROUP
    own = tl.minimum(row, tokens - 1).to(tl.int64)
    exists = (row < tokens)[:, None]
    k, part = tl.arange(0, DEPTH), tl.arange(0, PARTS)
    x_tile = x + own[:, None] * IN + k[None, :]
    x_scale = x_scales + own[:, None] * GROUPS + part[None, :]
    w_tile = w + weight_row[None, :].to(tl.int64) * IN + k[:, None]
    sums = tl.zeros((PARTS, weight_row.shape[0], row.shape[0]), tl.float32)
    for first in tl.range(0, IN, DEPTH, num_stages=STAGES):
        if IN % DEPTH == 0:
            a, b = tl.load(x_tile, mask=exists, other=0.0), tl.load(w_tile)
            scale = tl.load(x_scale)
        else:
            inside = first + k < IN
            a = tl.load(x_tile, mask=exists & inside[None, :], other=0.0)
            b = tl.load(w_tile, mask=inside[:, None], other=0.0)
            scale = tl.load(x_scale, mask=(first // FP8_GROUP + part < GROUPS)[None, :], other=0.0)
        product = parts_product(a, b, PARTS, FP8_GROUP)
        sums = tl.fma(product, tl.broadcast_to(tl.trans(scale)[:, None, :], product.shape), sums)
        x_tile += DEPTH
        x_scale += PARTS
        w_tile += DEPTH
    return sum_of_parts(sums)


@triton.jit
def _sums_of_groups(
    x, x_scales, w, row, tokens, weight_row, IN: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr
):
    """Return the sums [ROWS, COLUMNS], one group of K after another."""
    GROUPS: tl.constexpr = (IN + FP8_GROUP - 1) // FP8_GROUP
    IS_SMALL: tl.constexpr = row.shape[0] <= 16
    own = tl.minimum(row, tokens - 1).to(tl.int64)
    exists = (row < tokens)[:, None]
    k = tl.arange(0, FP8_GROUP)
    x_tile = x + own[:, None] * IN + k[None, :]
    x_scale = x_scales + own * GROUPS
    w_tile = w + weight_row[None, :].to(tl.int64) * IN + k[:, None]
    sums = tl.zeros((row.shape[0], weight_row.shape[0]), tl.float32)
    for first in tl.range(0, IN, DEPTH, num_stages=STAGES):
        for part in tl.static_range(0, DEPTH, FP8_GROUP):
            if IN % DEPTH == 0:
                a = tl.load(x_tile + part, mask=exists, other=0.0) if IS_SMALL else tl.load(x_tile + part)
                b = tl.load(w_tile + part)
                scale = tl.load(x_scale + part // FP8_GROUP)
            else:
                inside = first + part + k < IN
                a = tl.load(x_tile + part, mask=exists & inside[None, :], other=0.0)
                b = tl.load(w_tile + part, mask=inside[:, None], other=0.0)
                scale = tl.load(x_scale + part // FP8_GROUP, mask=first + part < IN, other=0.0)
            product = tl.dot(a, b)
            sums = tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)
        x_tile += DEPTH
        x_scale += DEPTH // FP8_GROUP
        w_tile += DEPTH
    return sums


@triton.jit
def quantised(x, dtype: tl.constexpr):
    """Quantise x [ROWS, FP8_GROUP] to `dtype`; return the quants, and a scale per row [ROWS] f32."""
    TOP: tl.constexpr = TOP_EXPONENT_FNUZ if dtype == tl.float8e4b8 else TOP_EXPONENT
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)
    exponent = largest.to(tl.int32, bitcast=True) >> MANTISSA_BITS
    # The scale and its inverse must both be normal f32 numbers.
    power = tl.minimum(tl.maximum(exponent - TOP, 1), 2 * BIAS - 1)
    scale = (power << MANTISSA_BITS).to(tl.float32, bitcast=True)
    inverse = ((2 * BIAS - power) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(dtype), scale
