"""Matmuls: a linear layer with its residual, and the gated pair of a feed-forward."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.product import normalised, product, store_scaled


@triton.jit
def linear(
    x,
    in_squares,
    w,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y [tokens, OUT] f32 = x [tokens, IN] times the transpose of w [OUT, IN], plus `residual` or None.

    `in_squares` are of a norm deferred to this matmul, or None; with `norm` [OUT], `scaled` and `squares` are
    written for the next.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.minimum(row, tokens - 1)
    sums = product(x, w, own, tl.minimum(column, OUT - 1), IN, DEPTH)
    sums = normalised(sums, in_squares, own, IN, IN // GROUP, EPS)
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    if residual is not None:
        sums += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(y + at, sums, mask=inside)
    if norm is not None:
        store_scaled(sums, norm, scaled, squares, row, column, inside, OUT, GROUP)


@triton.jit
def gated_linear(
    x,
    in_squares,
    w,
    y,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y [tokens, OUT] = silu(gate) * up, both products of x [tokens, IN] with w [2 * OUT, IN]: gate, then up.

    A tile's columns are gate and up in turn, so that one product makes both.
    """
    HALF: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * HALF
    own = tl.minimum(row, tokens - 1)
    each = tl.arange(0, COLUMNS)
    weight_row = tl.minimum(first + each // 2, OUT - 1) + each % 2 * OUT
    sums = normalised(product(x, w, own, weight_row, IN, DEPTH), in_squares, own, IN, IN // GROUP, EPS)
    gate, up = tl.split(tl.reshape(sums, (ROWS, HALF, 2)))
    column = first + tl.arange(0, HALF)
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    tl.store(y + at, (gate / (1 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=inside)
