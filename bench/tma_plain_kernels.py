"""Candidates for the matmuls of prefills on Hopper, in Triton: `linear` with loads by TMA."""

# ruff: noqa
# mypy: ignore-errors

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.product import store_scaled


@triton.jit
def linear(
    x, x_scales, w, scales, residual, norm, y, scaled, squares, scratch, tokens,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    x_map = tl.make_tensor_descriptor(x, [tokens, IN], [IN, 1], [ROWS, DEPTH])
    w_map = tl.make_tensor_descriptor(w, [OUT, IN], [IN, 1], [COLUMNS, DEPTH])
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < OUT)[None, :]
    at = row[:, None].to(tl.int64) * OUT + column[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    own = tl.minimum(row, tokens - 1).to(tl.int64)
    for k in tl.range(0, IN, DEPTH, warp_specialize=SPECIAL):
        a = x_map.load([first_row, k])
        b = w_map.load([first_column, k])
        if x_scales is not None:
            scale = tl.load(x_scales + own * (IN // DEPTH) + k // DEPTH)
            product = tl.dot(a, b.T)
            sums = tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)
        else:
            sums = tl.dot(a, b.T, sums)
    if scales is not None:
        sums *= tl.load(scales + column)[None, :]
    sums += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(y + at, sums, mask=inside)
    weight = tl.load(norm + column)
    store_scaled(sums, weight, scaled, squares, row, column, inside, OUT, GROUP)
