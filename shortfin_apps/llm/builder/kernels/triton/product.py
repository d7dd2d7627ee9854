"""The product of a tile of activations with a tile of weights, common to all matmuls."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels import triton as rooms
from shortfin_apps.llm.builder.kernels.triton.blocks import dequantised, load_terms
from shortfin_apps.llm.builder.kernels.triton.fp8 import fp8_product
from shortfin_apps.llm.builder.kernels.triton.parts import parts_product, sum_of_parts

PART_DEPTH = tl.constexpr(rooms.PART_DEPTH)


@triton.jit
def normalised_product(
    x, x_scales, squares, w, scales, minima, row, tokens, weight_row,
    IN: tl.constexpr, GROUP: tl.constexpr, EPS: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute `product`; with `squares`, also multiply each row by the 1 / rms of a deferred norm.

    `squares` [tokens, IN / GROUP] f32 has the sums of squares of the norm's input; x is already multiplied
    by the norm's weight (see __init__.py). EARLY: load `squares` before the product, so that the loads
    overlap. `x_scales`: the scales of x in 8-bit floats (see fp8.py), otherwise None.
    """
    own = tl.minimum(row, tokens - 1)
    if EARLY:
        parts = _sums_of_squares(squares, own, IN // GROUP)
    if w.dtype.element_ty.is_fp8():
        sums = fp8_product(x, x_scales, w, scales, row, tokens, weight_row, IN, DEPTH, PARTS, STAGES)
    else:
        sums = product(x, w, scales, minima, row, tokens, weight_row, IN, BLOCKS, DEPTH, PARTS, STAGES)
    if not EARLY:
        parts = _sums_of_squares(squares, own, IN // GROUP)
    if parts is None:
        return sums
    else:
        return sums * tl.rsqrt(sums_of_neighbours(parts, parts.shape[1]) / IN + EPS)


@triton.jit
def product(
    x, w, scales, minima, row, tokens, weight_row,
    IN: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Return the f32 products [ROWS, COLUMNS] of rows of x [tokens, IN] and rows of w [.., IN].

    `row` [ROWS] are the indices of rows of x, and may be out of range. `weight_row` [COLUMNS] are the
    indices of rows of w; they must be in range, and may have duplicates. DEPTH: elements of K that are
    loaded at once. With `scales`, w is in BLOCKS (see blocks.py), and is widened to the type of x.

    With PARTS > 1, K is divided among as many waves (see parts.py), in turns of PART_DEPTH elements, and
    their sums are added at the end. The order of additions then depends on PARTS alone, not on the tile.
    DEPTH must be a multiple of PARTS * PART_DEPTH.

    STAGES: pipeline stages of the loads; None: those of the whole kernel.
    """
    PACKED: tl.constexpr = 2 if BLOCKS is not None and BLOCKS[0] == 4 else 1  # elements of w per byte
    # The smallest tile is rarely full. Its rows out of range are masked: loading copies of the last row
    # instead would take as long as loading other rows.
    IS_SMALL: tl.constexpr = row.shape[0] <= 16
    own = tl.minimum(row, tokens - 1)
    exists = (row < tokens)[:, None]
    k = tl.arange(0, DEPTH)
    x_tile = x + own[:, None].to(tl.int64) * IN + k[None, :]
    packed = tl.arange(0, DEPTH // PACKED)
    w_tile = w + weight_row[None, :].to(tl.int64) * (IN // PACKED) + packed[:, None]
    if PARTS == 1:
        sums = tl.zeros((row.shape[0], weight_row.shape[0]), tl.float32)
    else:
        sums = tl.zeros((PARTS, weight_row.shape[0], row.shape[0]), tl.float32)
    for first in tl.range(0, IN, DEPTH, num_stages=STAGES):
        if IN % DEPTH == 0:
            a = tl.load(x_tile, mask=exists, other=0.0) if IS_SMALL else tl.load(x_tile)
            b = tl.load(w_tile)
        else:
            inside = (first + k < IN)[None, :]
            a = tl.load(x_tile, mask=exists & inside if IS_SMALL else inside, other=0.0)
            # The mask compares contiguous indices, so that one load takes several bytes.
            b = tl.load(w_tile, mask=(first // PACKED + packed < IN // PACKED)[:, None], other=0)
        if scales is not None:
            scale = load_terms(scales, weight_row, first, IN, DEPTH, BLOCKS)
            minimum = load_terms(minima, weight_row, first, IN, DEPTH, BLOCKS)
            b = dequantised(b, scale, minimum, a.dtype, BLOCKS)
        if PARTS == 1:
            sums = tl.dot(a, b, sums, input_precision="ieee")
        else:
            sums = parts_product(a, b, PARTS, PART_DEPTH, sums)
        x_tile += DEPTH
        w_tile += DEPTH // PACKED
    if PARTS == 1:
        return sums
    else:
        return sum_of_parts(sums)


@triton.jit
def _sums_of_squares(squares, row, GROUPS: tl.constexpr):
    """Load the sums of squares of the rows `row` of x, as [ROWS, partial sums]; None if `squares` is None."""
    if squares is None:
        return None
    else:
        PARTS: tl.constexpr = 32
        group = tl.arange(0, PARTS)
        at = squares + row[:, None].to(tl.int64) * GROUPS + group[None, :]
        parts = tl.zeros((row.shape[0], PARTS), tl.float32)
        for first in tl.static_range(0, GROUPS, PARTS):
            parts += tl.load(at + first, mask=(first + group < GROUPS)[None, :], other=0.0)
        # A small tile adds the partial sums later, so as not to wait for the loads yet. A large tile has no
        # registers for them.
        return parts if row.shape[0] <= 64 else sums_of_neighbours(parts, PARTS)


@triton.jit
def store_scaled(
    x, weight, scaled, squares, row, column, inside, FEATURES: tl.constexpr, GROUP: tl.constexpr
):
    """Write `scaled` and `squares` of a tile of x [ROWS, COLUMNS], for a norm deferred to the next matmul.

    See __init__.py. `weight` [COLUMNS] is the norm's weight. `row` and `column` are the indices of the
    tile's rows and columns; only elements that are `inside` [ROWS, COLUMNS] are written.
    """
    COLUMNS: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = FEATURES // GROUP
    at = row[:, None].to(tl.int64) * FEATURES + column[None, :]
    tl.store(scaled + at, (x * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
    # An explicit fused multiply-add, because the compiler would fuse squares and sums only in some tiles.
    even, odd = tl.split(tl.reshape(tl.where(inside, x, 0.0), (x.shape[0], COLUMNS // 2, 2)))
    sums = sums_of_neighbours(tl.fma(even, even, odd * odd), GROUP // 2)
    first = tl.min(column, axis=0) // GROUP
    group = first + tl.arange(0, COLUMNS // GROUP)
    any_row = tl.max(inside.to(tl.int32), axis=1) > 0
    tl.store(
        squares + row[:, None].to(tl.int64) * GROUPS + group[None, :],
        sums,
        mask=any_row[:, None] & (group < GROUPS)[None, :],
    )


@triton.jit
def store_scaled_row(
    x, norm, scaled, squares, row, feature, inside, FEATURES: tl.constexpr, GROUP: tl.constexpr
):
    """Write one row of x [COLUMNS], like `store_scaled`; nothing without a `norm` [FEATURES]."""
    if norm is not None:
        rows = row + tl.arange(0, 1)
        weight = tl.load(norm + feature, mask=inside, other=0.0)
        store_scaled(x[None, :], weight, scaled, squares, rows, feature, inside[None, :], FEATURES, GROUP)


@triton.jit
def sums_of_neighbours(x, COUNT: tl.constexpr):
    """Sum COUNT neighbours, by pairs: x [ROWS, COLUMNS] -> [ROWS, COLUMNS / COUNT].

    COUNT must be a power of two. Unlike in tl.sum, the order of additions does not depend on the tile.
    """
    if COUNT == 1:
        return x
    else:
        pairs = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
        return sums_of_neighbours(pairs, COUNT // 2)
