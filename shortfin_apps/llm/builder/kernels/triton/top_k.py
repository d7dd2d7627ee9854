"""Exact top-k in two launches: the best of each segment of a row, then the best of those.

Elements are compared as integers: a float's bits, mapped so that their order is that of the values, and below
them the complement of the index, so that of equal values the lower index comes first. NaN comes before all.
"""

import triton
import triton.language as tl

SIGN = tl.constexpr(-(1 << 31))
NAN_KEY = tl.constexpr((1 << 31) - 1)
LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def keys_of(values, indices):
    """i64 keys of f32 `values` and i32 `indices` of one shape."""
    bits = values.to(tl.int32, bitcast=True)
    # Negative floats grow downwards: their other bits are flipped. Both zeros are equal.
    ordered = tl.where(bits < 0, bits ^ NAN_KEY, bits)
    ordered = tl.where(values == 0.0, 0, ordered)
    ordered = tl.where(values != values, NAN_KEY, ordered)
    return (ordered.to(tl.int64) << 32) | (NAN_KEY - indices).to(tl.int64)


@triton.jit
def best_of_segments(logits, best, SIZE: tl.constexpr, SEGMENT: tl.constexpr, KEPT: tl.constexpr):
    """best [rows, segments, KEPT] i64: the largest keys of each SEGMENT of logits [rows, SIZE] f32."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    SEGMENTS: tl.constexpr = (SIZE + SEGMENT - 1) // SEGMENT
    index = segment * SEGMENT + tl.arange(0, SEGMENT)
    inside = index < SIZE
    values = tl.load(logits + row.to(tl.int64) * SIZE + index, mask=inside, other=0.0)
    keys = tl.where(inside, keys_of(values, index), LEAST)
    kept = tl.topk(keys, KEPT)
    tl.store(best + (row.to(tl.int64) * SEGMENTS + segment) * KEPT + tl.arange(0, KEPT), kept)


@triton.jit
def best_of_row(
    logits,
    best,
    values,
    indices,
    SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
):
    """values [rows, K] f32, descending, and indices [rows, K] i64, of best [rows, CANDIDATES] i64.

    A row of `logits` [rows, SIZE] f32 that holds NaN has NaN values.
    """
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    found = tl.load(best + row * CANDIDATES + candidate, mask=candidate < CANDIDATES, other=LEAST)
    kept = tl.topk(found, KEPT)
    index = NAN_KEY - kept.to(tl.int32)
    place = tl.arange(0, KEPT)
    wanted = place < K
    value = tl.load(logits + row * SIZE + index, mask=wanted, other=0.0)
    holds_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    value = tl.where(holds_nan, float("nan"), value)
    tl.store(values + row * K + place, value, mask=wanted)
    tl.store(indices + row * K + place, index.to(tl.int64), mask=wanted)
