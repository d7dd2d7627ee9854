"""Draws of tokens from rows of logits, by the rule in `sampling_rule.py`."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.row_sampling import draw_from_row
from shortfin_apps.llm.builder.kernels.triton.sampling_arithmetic import (
    LEAST_WEIGHT,
    PROMPT_LENGTH,
    SCALE,
    SEED,
    SHARE,
    SPOILED,
    TOP_K,
    WHOLE_ROW,
    high_product,
    holder_of,
    is_finite,
    philox,
    pick,
    share_of,
    weights_of,
)


@triton.jit
def draw(
    values, indices, logits, row_indices, masses, sampling, slots, positions, last_tokens, counts, token_ids,
    rows,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, ADVANCES: tl.constexpr,
):  # fmt: skip
    """Draw token_ids [rows] i64, and store them in the slots [rows] i64 of last_tokens [any] i64.

    Tokens that are stored are counted in the same slot of counts [any, SIZE] i32, if this is not None.

    Row r is drawn from row row_indices[r] (r if `row_indices` is None) of logits [any, SIZE] f32, with the
    candidates values [any, K] f32, descending, and indices [any, K] i64. `masses` holds the sums of weights
    of the parts of each row (see row_sampling.py). `sampling` [6, rows] i64 is specified in abi.py.

    A row with a best value that is not finite gets the token id SPOILED. Such a token is not stored, nor one
    of a padding row (negative position) or for a negative slot. If ADVANCES, `positions` [rows] i64 become
    the next ones, in place, except for padding rows. BLOCK and PARTS_BLOCK are K and PARTS, rounded up to
    powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    field = sampling + row
    source = row if row_indices is None else tl.load(row_indices + row)
    position = tl.load(positions + row)
    count = position - tl.load(field + PROMPT_LENGTH * rows) + 2
    candidates = values + source * K
    token_id = tl.full((), SPOILED, tl.int64)
    if is_finite(tl.load(candidates)):
        if tl.load(field + TOP_K * rows) == WHOLE_ROW:
            of_parts = masses + row * 2 * PARTS
            token_id = draw_from_row(
                logits + source * SIZE, candidates, of_parts, field, rows, count,
                SIZE, PART, PARTS, PARTS_BLOCK, K, BLOCK,
            )  # fmt: skip
        else:
            token_id = draw_from_candidates(candidates, indices + source * K, field, rows, count, K, BLOCK)
    tl.store(token_ids + row, token_id)
    slot = tl.load(slots + row)
    stores = (token_id >= 0) & (position >= 0) & (slot >= 0)
    tl.store(last_tokens + slot, token_id, mask=stores)
    if counts is not None:
        of_token = counts + slot * SIZE + token_id
        tl.store(of_token, tl.maximum(tl.load(of_token, mask=stores, other=0), 0) + 1, mask=stores)
    if ADVANCES:
        tl.store(positions + row, position + 1, mask=position >= 0)


@triton.jit
def draw_from_candidates(values, indices, field, rows, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """Draw a token from the K best of a row: values [K] f32, descending and finite; token ids indices [K].

    `field` points at the row's column of `sampling` [6, rows] i64 (abi.py); `count` numbers the draw.
    """
    place = tl.arange(0, BLOCK)
    is_candidate = place < K
    value = tl.load(values + place, mask=is_candidate, other=0.0)
    weights = weights_of(value, tl.load(values), tl.load(field + SCALE * rows))
    weights = tl.where(is_candidate & (place < tl.load(field + TOP_K * rows)), weights, 0)
    before = tl.cumsum(weights, axis=0) - weights
    within = share_of(tl.sum(weights, axis=0), tl.load(field + SHARE * rows))
    passes = (before < within) & (weights >= tl.load(field + LEAST_WEIGHT * rows))
    kept = tl.where(passes | (place == 0), weights, 0)

    word = philox(tl.load(field + SEED * rows), count, tl.full((), 0, tl.int64))
    target = high_product(word, tl.sum(kept, axis=0).to(tl.uint64)).to(tl.int64)
    index = tl.load(indices + place, mask=is_candidate, other=0)
    return pick(index, holder_of(target, kept, before))
