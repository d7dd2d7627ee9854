"""Matmuls: a linear layer with its residual, and the gated pair of a feed-forward."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE
from shortfin_apps.llm.builder.kernels.triton.product import normalised_product, store_scaled

LIMIT, SLOPE = tl.constexpr(CLAMPED_LIMIT), tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def linear(
    x, x_scales, in_squares, w, scales, minima, residual, norm, y, scaled, squares, tokens,
    IN: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Multiply x [tokens, IN] by the transpose of w [OUT, IN]: y [tokens, OUT] f32, plus any `residual`.

    `scales` and `minima` belong to a quantised w (in BLOCKS, see blocks.py, or in 8-bit floats), otherwise
    they are None. `in_squares` belongs to a norm that is deferred to this matmul, otherwise it is None. With
    `norm` [OUT], also writes `scaled` and `squares` for the next matmul.
    """
    linear_tile(
        tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS,
        x, x_scales, in_squares, w, scales, minima, residual, norm, y, scaled, squares, tokens,
        IN, OUT, EPS, GROUP, BLOCKS, ROWS, COLUMNS, DEPTH, EARLY, PARTS,
    )  # fmt: skip


@triton.jit
def linear_tile(
    first_row, first_column,
    x, x_scales, in_squares, w, scales, minima, residual, norm, y, scaled, squares, tokens,
    IN: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute the tile of `linear` that starts at a row and a column. `y` must not be `residual`."""
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    # A small tile loads the operands of its epilogue before the product; large tiles lack the registers.
    IS_SMALL: tl.constexpr = ROWS <= 16
    if IS_SMALL:
        added = _loaded(residual, at, inside)
        weight = _loaded(norm, column, column < OUT)
    weight_row = tl.minimum(column, OUT - 1)
    sums = normalised_product(
        x, x_scales, in_squares, w, scales, minima, row, tokens, weight_row,
        IN, GROUP, EPS, BLOCKS, DEPTH, EARLY, PARTS, STAGES,
    )  # fmt: skip
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
    """Load the elements `at` of `operand`; None if `operand` is None."""
    if operand is None:
        return None
    else:
        return tl.load(operand + at, mask=inside, other=0.0)


@triton.jit
def gated_linear(
    x, x_scales, in_squares, w, scales, minima, y, tokens,
    IN: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute y [tokens, OUT] = silu(gate) * up, from x [tokens, IN] and w [2 * OUT, IN].

    w has the rows of gate, then the rows of up, and may be in blocks, as in `linear`. ACTIVATION may replace
    silu (see `gated`).
    """
    gated_linear_tile(
        tl.program_id(0) * ROWS, tl.program_id(1) * (COLUMNS // 2),
        x, x_scales, in_squares, w, scales, minima, y, tokens,
        IN, OUT, EPS, GROUP, BLOCKS, ROWS, COLUMNS, DEPTH, EARLY, PARTS, ACTIVATION,
    )  # fmt: skip


@triton.jit
def gated_linear_tile(
    first_row, first,
    x, x_scales, in_squares, w, scales, minima, y, tokens,
    IN: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute the tile of `gated_linear` with COLUMNS / 2 columns of y, from column `first` on.

    The columns of the product alternate between gate and up, so that one product computes both.
    """
    row = first_row + tl.arange(0, ROWS)
    each = tl.arange(0, COLUMNS)
    weight_row = tl.minimum(first + each // 2, OUT - 1) + each % 2 * OUT
    sums = normalised_product(
        x, x_scales, in_squares, w, scales, minima, row, tokens, weight_row,
        IN, GROUP, EPS, BLOCKS, DEPTH, EARLY, PARTS, STAGES,
    )  # fmt: skip
    store_gated(y, sums, row, tokens, first, OUT, ACTIVATION)


@triton.jit
def store_gated(y, sums, row, rows, first, OUT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write the activated gate times up to y [rows, OUT] at `row` [ROWS], starting at column `first`.

    The columns of `sums` [ROWS, COLUMNS] alternate between gate and up.
    """
    HALF: tl.constexpr = sums.shape[1] // 2
    gate, up = tl.split(tl.reshape(sums, (sums.shape[0], HALF, 2)))
    column = first + tl.arange(0, HALF)
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    inside = (row < rows)[:, None] & (column < OUT)[None, :]
    tl.store(y + at, gated(gate, up, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Combine `gate` and `up` by an activation (`Activation` in model/operations.py).

    All activations are gate * sigmoid(inner) * up. "gelu" is the approximation with tanh, as (1 + tanh(y)) /
    2 is the sigmoid of 2 y. "clamped" first limits gate and up, and adds 1 to up.
    """
    inner = gate
    if ACTIVATION == "gelu":
        inner = gate * tl.fma(gate * gate, 1.5957691216057308 * 0.044715, 1.5957691216057308)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        inner = gate * SLOPE
    return gate / (1 + tl.exp(-inner)) * up
