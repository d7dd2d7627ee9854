"""Matmuls of routed experts; each tile of rows reads the matrix of one expert (see routing.py).

A row is a token for one of its experts. w has the matrices of all experts, concatenated. Workgroups of tiles
without an expert return at once. `bias` f32, unless None, has an element per row of w, which is added to the
products.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.linear import store_gated
from shortfin_apps.llm.builder.kernels.triton.product import normalised_product, store_scaled_row


@triton.jit
def gated_experts(
    x, x_scales, in_squares, w, scales, minima, bias, order, tile_experts, y, tokens, rows,
    IN: tl.constexpr, OUT: tl.constexpr, COUNT: tl.constexpr, PER_TOKEN: tl.constexpr, EPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, OUT] = silu(gate) * up, from x [tokens, IN] and w [COUNT, 2 * OUT, IN].

    The matrix of an expert has the rows of gate, then the rows of up. Row r of y belongs to token r /
    PER_TOKEN. See gated_linear in linear.py for ACTIVATION and the columns of a tile.
    """
    HALF: tl.constexpr = COLUMNS // 2
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert < COUNT:
        row = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
        first = tl.program_id(1) * HALF
        each = tl.arange(0, COLUMNS)
        weight_row = expert * (2 * OUT) + tl.minimum(first + each // 2, OUT - 1) + each % 2 * OUT
        token = row // PER_TOKEN
        sums = normalised_product(
            x, x_scales, in_squares, w, scales, minima, token, tokens, weight_row,
            IN, GROUP, EPS, BLOCKS, DEPTH, EARLY, PARTS,
        )  # fmt: skip
        if bias is not None:
            sums += tl.load(bias + weight_row)[None, :]
        store_gated(y, sums, row, rows, first, OUT, ACTIVATION)


@triton.jit
def multiply_experts(
    x, x_scales, w, scales, minima, bias, order, tile_experts, y, rows,
    IN: tl.constexpr, OUT: tl.constexpr, COUNT: tl.constexpr, EPS: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Multiply each row of x [rows, IN] by the transpose of its expert's matrix: y [rows, OUT] f32.

    w is [COUNT, OUT, IN].
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert < COUNT:
        row = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        weight_row = expert * OUT + tl.minimum(column, OUT - 1)
        sums = normalised_product(
            x, x_scales, None, w, scales, minima, row, rows, weight_row,
            IN, GROUP, EPS, BLOCKS, DEPTH, EARLY, PARTS,
        )  # fmt: skip
        if bias is not None:
            sums += tl.load(bias + weight_row)[None, :]
        at = row[:, None].to(tl.int64) * OUT + column[None, :]
        tl.store(y + at, sums, mask=(row < rows)[:, None] & (column < OUT)[None, :])


@triton.jit
def sum_experts(
    products, weights, chosen, residual, norm, y, scaled, squares,
    FEATURES: tl.constexpr, COUNT: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute y [tokens, FEATURES] f32: residual + the sum of a token's products times their weights.

    Products are added from the most likely expert to the least. `products` [tokens, PER_TOKEN, FEATURES] f32
    are undefined, and not added, where `chosen` is COUNT. A workgroup handles one token. With `norm`, also
    writes `scaled` and `squares` for the next matmul.
    """
    token = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    own = token.to(tl.int64) * FEATURES + feature
    values = tl.load(residual + own, mask=inside, other=0.0)
    for rank in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + rank
        has_expert = tl.load(chosen + row) < COUNT
        at = row.to(tl.int64) * FEATURES + feature
        product = tl.load(products + at, mask=inside & has_expert, other=0.0)
        values += tl.load(weights + row) * product
    tl.store(y + own, values, mask=inside)
    store_scaled_row(values, norm, scaled, squares, token, feature, inside, FEATURES, GROUP)
