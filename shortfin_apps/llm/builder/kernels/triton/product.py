"""The product of a tile of activations with a tile of weights, which all matmuls share."""

import triton
import triton.language as tl


@triton.jit
def product(x, w, row, weight_row, IN: tl.constexpr, DEPTH: tl.constexpr):
    """x [.., IN] at `row` [ROWS] times the transpose of w [.., IN] at `weight_row` [COLUMNS], in f32.

    Rows of either may repeat, and may not lie outside. DEPTH elements of K are loaded at once.
    """
    k = tl.arange(0, DEPTH)
    x_tile = x + row[:, None].to(tl.int64) * IN + k[None, :]
    w_tile = w + weight_row[None, :].to(tl.int64) * IN + k[:, None]
    sums = tl.zeros((row.shape[0], weight_row.shape[0]), tl.float32)
    for first in range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            a = tl.load(x_tile)
            b = tl.load(w_tile)
        else:
            a = tl.load(x_tile, mask=(first + k < IN)[None, :], other=0.0)
            b = tl.load(w_tile, mask=(first + k < IN)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        x_tile += DEPTH
        w_tile += DEPTH
    return sums


@triton.jit
def normalised(sums, squares, row, IN: tl.constexpr, GROUPS: tl.constexpr, EPS: tl.constexpr):
    """`sums` [ROWS, COLUMNS] of scaled activations, times 1 / rms of each row of x [.., IN].

    `squares` [.., GROUPS] f32 are those of x; None if the activations were normalised before.
    """
    if squares is None:
        return sums
    else:
        STEP: tl.constexpr = 16
        group = tl.arange(0, STEP)
        total = tl.zeros((row.shape[0],), tl.float32)
        for first in range(0, GROUPS, STEP):
            at = squares + row[:, None].to(tl.int64) * GROUPS + first + group[None, :]
            total += tl.sum(tl.load(at, mask=(first + group < GROUPS)[None, :], other=0.0), axis=1)
        return sums * tl.rsqrt(total / IN + EPS)[:, None]


@triton.jit
def store_scaled(x, norm, scaled, squares, row, column, inside, FEATURES: tl.constexpr, GROUP: tl.constexpr):
    """Writes what the next norm's reader needs of a tile of x [ROWS, COLUMNS] (see __init__.py).

    `row` and `column` say where the tile lies, and `inside` [ROWS, COLUMNS] what of it exists.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = FEATURES // GROUP
    weight = tl.load(norm + column, mask=column < FEATURES, other=0.0)
    at = row[:, None].to(tl.int64) * FEATURES + column[None, :]
    tl.store(scaled + at, (x * weight[None, :]).to(scaled.dtype.element_ty), mask=inside)
    kept = tl.where(inside, x, 0.0)
    sums = tl.sum(tl.reshape(kept * kept, (ROWS, COLUMNS // GROUP, GROUP)), axis=2)
    first = tl.min(column, axis=0) // GROUP
    group = first + tl.arange(0, COLUMNS // GROUP)
    any_row = tl.max(inside.to(tl.int32), axis=1) > 0
    tl.store(
        squares + row[:, None].to(tl.int64) * GROUPS + group[None, :],
        sums,
        mask=any_row[:, None] & (group < GROUPS)[None, :],
    )
