"""The sampling of a decode loop (a decode that samples on the device), by the rule in `sampling_rule.py`."""

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
def sample(
    values, indices, logits, masses, sampling, tokens, positions, token_ids, rows,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw token_ids [rows] i64, and update `tokens` and `positions` [rows] i64 in place for the next decode.

    Candidates are values [rows, K] f32, descending, and indices [rows, K] i64, of logits [rows, SIZE] f32.
    `masses` holds the sums of weights of the parts of each row (see row_sampling.py). `sampling` [6, rows]
    i64 is specified in abi.py. A row with a best value that is not finite gets the token id SPOILED, and its
    entry of `tokens` is not changed. A padding row keeps its token and its position. BLOCK is K and
    PARTS_BLOCK is PARTS, rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    field = sampling + row
    position = tl.load(positions + row)
    count = position - tl.load(field + PROMPT_LENGTH * rows) + 2
    candidates = values + row * K
    token_id = tl.full((), SPOILED, tl.int64)
    if is_finite(tl.load(candidates)):
        if tl.load(field + TOP_K * rows) == WHOLE_ROW:
            of_parts = masses + row * 2 * PARTS
            token_id = draw_from_row(
                logits + row * SIZE, candidates, of_parts, field, rows, count,
                SIZE, PART, PARTS, PARTS_BLOCK, K, BLOCK,
            )  # fmt: skip
        else:
            token_id = draw_from_candidates(candidates, indices + row * K, field, rows, count, K, BLOCK)
    tl.store(token_ids + row, token_id)
    is_padding = position < 0
    tl.store(tokens + row, token_id, mask=(token_id >= 0) & (position >= 0))
    tl.store(positions + row, tl.where(is_padding, position, position + 1))


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
