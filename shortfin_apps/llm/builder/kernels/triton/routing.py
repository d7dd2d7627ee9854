"""The experts of each token, and the order in which the experts' matmuls process the tokens."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.top_k import LEAST, index_of, keys_of


@triton.jit
def route(
    logits, scores, slots, weights, chosen,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, KEPT: tl.constexpr,
    IS_NORMALISED: tl.constexpr, SCALE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Choose each token's experts, most likely first: `chosen` [tokens, PER_TOKEN] i32, and `weights` f32.

    `logits` [tokens, COUNT] f32 are the router's. Weights are the softmax over all logits or, unless `scores`
    is None, the experts' `scores` [tokens, COUNT] f32. IS_NORMALISED rescales a token's weights to a sum of
    1. All are multiplied by SCALE. Of equal logits, the lower index comes first. A token with
    a NaN among its logits has NaN weights. A token is padding if its slot in `slots` [tokens] i64 is in page
    0; padding gets the expert COUNT, which means none. BLOCK is COUNT and KEPT is PER_TOKEN, rounded up to
    powers of two. A workgroup handles one token.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    inside = expert < COUNT
    row = logits + token * COUNT
    logit = tl.load(row + expert, mask=inside, other=float("-inf"))
    kept = index_of(tl.topk(tl.where(inside, keys_of(logit, expert), LEAST), KEPT))
    place = tl.arange(0, KEPT)
    wanted = place < PER_TOKEN
    if scores is None:
        largest = tl.max(logit, axis=0)
        mass = tl.sum(tl.exp(logit - largest), axis=0)
        share = tl.exp(tl.load(row + kept, mask=wanted, other=float("-inf")) - largest) / mass
    else:
        share = tl.load(scores + token * COUNT + kept, mask=wanted, other=0.0)
    if IS_NORMALISED:
        share /= tl.sum(tl.where(wanted, share, 0.0), axis=0)
    share *= SCALE
    is_padding = tl.load(slots + token) < STRIDE
    at = token * PER_TOKEN + place
    tl.store(weights + at, tl.where(is_padding, 0.0, share), mask=wanted)
    tl.store(chosen + at, tl.where(is_padding, COUNT, kept), mask=wanted)


@triton.jit
def sort_by_expert(
    chosen, order, tile_experts, rows, tiles,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the indices of rows to `order` [tiles, ROWS] i32, in tiles of one expert each.

    `tile_experts` [tiles] i32 receives the expert of each tile. `chosen` [rows] i32 has the expert of each
    row. The remainder of an expert's last tile is filled with the out-of-range index `rows`, and unused tiles
    have the out-of-range expert COUNT. A workgroup handles one expert, and STEP rows at a time. BLOCK is
    COUNT rounded up to a power of two.
    """
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    found = tl.zeros((STEP, BLOCK), tl.int32)
    for first in range(0, rows, STEP):
        has = _experts_at(chosen, first, rows, COUNT, STEP)
        found += (has[:, None] == expert[None, :]).to(tl.int32)
    counts = tl.where(expert < COUNT, tl.sum(found, axis=0), 0)
    num_tiles = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(expert < own, num_tiles, 0), axis=0)
    end_tile = first_tile + tl.sum(tl.where(expert == own, num_tiles, 0), axis=0)
    place = first_tile * ROWS
    for first in range(0, rows, STEP):
        is_own = (_experts_at(chosen, first, rows, COUNT, STEP) == own).to(tl.int32)
        at = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(order + at, first + tl.arange(0, STEP), mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    left = place + tl.arange(0, ROWS)
    tl.store(order + left, tl.zeros((ROWS,), tl.int32) + rows, mask=left < end_tile * ROWS)
    _fill(tile_experts, first_tile, end_tile, own, STEP)
    if own == COUNT - 1:
        _fill(tile_experts, end_tile, tiles, COUNT, STEP)


@triton.jit
def _experts_at(chosen, first, rows, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Load the experts of STEP rows from `first` on; COUNT (no expert) for rows after the last."""
    row = first + tl.arange(0, STEP)
    return tl.load(chosen + row, mask=row < rows, other=COUNT)


@triton.jit
def _fill(numbers, begin, end, value, STEP: tl.constexpr):
    """Set numbers[begin:end] = value."""
    for first in range(begin, end, STEP):
        at = first + tl.arange(0, STEP)
        tl.store(numbers + at, tl.zeros((STEP,), tl.int32) + value, mask=at < end)
