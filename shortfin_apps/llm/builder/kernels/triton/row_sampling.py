"""Tokens drawn from full rows of logits, by the rule in `sampling_rule.py`.

A row is divided into parts. One workgroup per part sums the weights of the part's tokens. Then one workgroup
per row finds the part that contains the drawn number, and the token in that part. If the token is among the
row's K best candidates, these decide whether top-p keeps the token, as all more likely tokens are candidates
too. Otherwise the workgroup sums the weights of the whole row again.

`field` points at the row's column of `sampling` [6, rows] i64 (abi.py).
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.sampling_arithmetic import (
    LEAST_WEIGHT,
    SCALE,
    SEED,
    SHARE,
    SPOILED,
    TOP_K,
    WHOLE_ROW,
    WHOLE_SHARE,
    high_product,
    holder_of,
    philox,
    pick,
    share_of,
    weights_of,
)


@triton.jit
def weigh_parts(
    values, logits, row_indices, sampling, masses, rows,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write masses [rows, 2, PARTS] i64: for each part of a row, two sums of weights.

    The first is of the weights that min-p keeps, the second of all. A part has PART tokens. Row r is row
    row_indices[r] (r if `row_indices` is None) of logits [any, SIZE] f32; values [any, K] f32 are the best
    of these rows. Nothing is written for rows with a top-k.
    """
    row = tl.program_id(0).to(tl.int64)
    field = sampling + row
    if tl.load(field + TOP_K * rows) == WHOLE_ROW:
        source = row if row_indices is None else tl.load(row_indices + row)
        part = tl.program_id(1)
        scale = tl.load(field + SCALE * rows)
        weights = weights_of_part(
            logits + source * SIZE, part, tl.load(values + source * K), scale, SIZE, PART
        )
        kept = tl.where(weights >= tl.load(field + LEAST_WEIGHT * rows), weights, 0)
        of_parts = masses + row * 2 * PARTS + part
        tl.store(of_parts, tl.sum(kept, axis=0))
        tl.store(of_parts + PARTS, tl.sum(weights, axis=0))


@triton.jit
def draw_from_row(
    logits, values, masses, field, rows, count,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token from logits [SIZE] f32 with the best values [K] f32, descending and finite.

    `masses` [2, PARTS] i64 are the sums of weights of the row's parts; `count` numbers the draw.
    """
    place = tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS_BLOCK)
    best, scale = tl.load(values), tl.load(field + SCALE * rows)
    share, seed = tl.load(field + SHARE * rows), tl.load(field + SEED * rows)
    candidates = weights_of(tl.load(values + place, mask=place < K, other=float("-inf")), best, scale)
    least_candidate = pick(candidates, place == K - 1)
    total = tl.sum(tl.load(masses + PARTS + part, mask=part < PARTS, other=0), axis=0)
    within = tl.maximum(share_of(total, share), 1)
    of_parts = tl.load(masses + part, mask=part < PARTS, other=0)
    pivot = tl.maximum(tl.load(field + LEAST_WEIGHT * rows), 1) - 1
    attempt = tl.full((), 0, tl.int64)
    token_id = tl.full((), SPOILED, tl.int64)
    while token_id == SPOILED:
        word = philox(seed, count, attempt)
        target = high_product(word, tl.sum(of_parts, axis=0).to(tl.uint64)).to(tl.int64)
        found, weight = find(logits, target, of_parts, pivot, best, scale, SIZE, PART, PARTS_BLOCK)
        above = tl.sum(tl.where(candidates > weight, candidates, 0), axis=0)
        if (share == WHOLE_SHARE) | ((weight >= least_candidate) & (above < within)):
            token_id = found
        else:
            of_parts = weigh_row(logits, weight, best, scale, SIZE, PART, PARTS, PARTS_BLOCK)
            if tl.sum(of_parts, axis=0) < within:
                token_id = found
        pivot = weight
        attempt += 1
    return token_id


@triton.jit
def find(
    logits, target, of_parts, pivot, best, scale,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token that contains `target`, of the tokens with weights above `pivot`, and its weight.

    The token id and the weight are i64. The weights are laid end to end, in the order of token ids.
    `of_parts` [PARTS_BLOCK] i64 are the sums of the weights above `pivot` in each part.
    """
    before_parts = tl.cumsum(of_parts, axis=0) - of_parts
    holds = holder_of(target, of_parts, before_parts)
    part = pick(tl.arange(0, PARTS_BLOCK).to(tl.int64), holds)
    target -= pick(before_parts, holds)
    weights = weights_of_part(logits, part, best, scale, SIZE, PART)
    weights = tl.where(weights > pivot, weights, 0)
    holds = holder_of(target, weights, tl.cumsum(weights, axis=0) - weights)
    index = part * PART + tl.arange(0, PART)
    return pick(index, holds), pick(weights, holds)


@triton.jit
def weigh_row(
    logits, pivot, best, scale,
    SIZE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of the weights above `pivot` in each part of a row, [PARTS_BLOCK] i64."""
    part = tl.arange(0, PARTS_BLOCK)
    of_parts = tl.zeros((PARTS_BLOCK,), tl.int64)
    for each in tl.range(PARTS):
        weights = weights_of_part(logits, each, best, scale, SIZE, PART)
        mass = tl.sum(tl.where(weights > pivot, weights, 0), axis=0)
        of_parts = tl.where(part == each, mass, of_parts)
    return of_parts


@triton.jit
def weights_of_part(logits, part, best, scale, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return the weights of a part of logits [SIZE] f32, [PART] i64; 0 after the end of the row."""
    index = part * PART + tl.arange(0, PART)
    value = tl.load(logits + index, mask=index < SIZE, other=float("-inf"))
    return weights_of(value, best, scale)
