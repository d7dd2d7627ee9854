"""Matmuls: a linear layer with its residual, and the gated pair of a feed-forward."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE
from shortfin_apps.llm.builder.kernels.triton.product import normalised_product, store_scaled

LIMIT, SLOPE = tl.constexpr(CLAMPED_LIMIT), tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def linear(
    x,
    x_scales,
    in_squares,
    w,
    scales,
    minima,
    residual,
    norm,
    y,
    scaled,
    squares,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y [tokens, OUT] f32 = x [tokens, IN] times the transpose of w [OUT, IN], plus `residual` or None.

    `scales` and `minima` are of a w in BLOCKS (see blocks.py), else None. `in_squares` are of a norm deferred
    to this matmul, or None; with `norm` [OUT], `scaled` and `squares` are written for the next.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    # What a small tile needs after the product is loaded before; for large ones, registers are too few.
    IS_SMALL: tl.constexpr = ROWS <= 16
    if IS_SMALL:
        added = _loaded(residual, at, inside)
        weight = _loaded(norm, column, column < OUT)
    weight_row = tl.minimum(column, OUT - 1)
    sums = normalised_product(
        x,
        x_scales,
        in_squares,
        w,
        scales,
        minima,
        row,
        tokens,
        weight_row,
        IN,
        GROUP,
        EPS,
        BLOCKS,
        DEPTH,
        EARLY,
    )
    if not IS_SMALL:
        added = _loaded(residual, at, inside)
        weight = _loaded(norm, column, column < OUT)
    if added is not None:
        sums += added
    tl.store(y + at, sums, mask=inside)
    if weight is not None:
        store_scaled(sums, weight, scaled, squares, row, column, inside, OUT, GROUP)


@triton.jit
def _loaded(operand, at, inside):
    """The elements of an operand; None if it is absent."""
    if operand is None:
        return None
    else:
        return tl.load(operand + at, mask=inside, other=0.0)


@triton.jit
def gated_linear(
    x,
    x_scales,
    in_squares,
    w,
    scales,
    minima,
    y,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """y [tokens, OUT] = silu(gate) * up, both products of x [tokens, IN] with w [2 * OUT, IN]: gate, then up.

    Or another ACTIVATION (see `gated`). w may be in blocks, as in `linear`. A tile's columns are gate and up
    in turn, so that one product makes both.
    """
    HALF: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * HALF
    each = tl.arange(0, COLUMNS)
    weight_row = tl.minimum(first + each // 2, OUT - 1) + each % 2 * OUT
    sums = normalised_product(
        x,
        x_scales,
        in_squares,
        w,
        scales,
        minima,
        row,
        tokens,
        weight_row,
        IN,
        GROUP,
        EPS,
        BLOCKS,
        DEPTH,
        EARLY,
    )
    store_gated(y, sums, row, tokens, first, OUT, ACTIVATION)


@triton.jit
def store_gated(y, sums, row, rows, first, OUT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Writes the activated gate times up to y [rows, OUT] at `row` [ROWS], from column `first` on.

    `sums` [ROWS, COLUMNS] are gate and up in turn.
    """
    HALF: tl.constexpr = sums.shape[1] // 2
    gate, up = tl.split(tl.reshape(sums, (sums.shape[0], HALF, 2)))
    column = first + tl.arange(0, HALF)
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    inside = (row < rows)[:, None] & (column < OUT)[None, :]
    tl.store(y + at, gated(gate, up, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """silu of `gate` times `up`, or gelu's, by its approximation with tanh: (1 + tanh(y)) / 2 is the sigmoid
    of 2 y; or what "clamped" makes of both (`Activation` in model/spec.py)."""
    inner = gate
    if ACTIVATION == "gelu":
        inner = gate * tl.fma(gate * gate, 1.5957691216057308 * 0.044715, 1.5957691216057308)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        inner = gate * SLOPE
    return gate / (1 + tl.exp(-inner)) * up
