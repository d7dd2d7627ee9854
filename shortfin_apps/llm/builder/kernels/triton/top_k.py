"""Exact top-k in two launches: the best of each chunk of a row, then the best elements of the best chunks.

A group is CHUNK chunks. The second launch sorts three times: groups, the chunks of the k best groups, and the
elements of the k best chunks.

An element's key is an integer that is unique in its row. The high bits are the float's bits, mapped so that
integers order like floats, with NaN as the largest. The low bits are the complement of the index, so that of
equal values the one with the lower index comes first. A chunk whose best key is not among the k best of all
chunks' best keys therefore contains none of the k best elements. The same holds for groups.
"""

import triton
import triton.language as tl

NAN_KEY = tl.constexpr((1 << 31) - 1)
LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def keys_of(values, indices):
    """Return the i64 keys of f32 `values` and i32 `indices` of one shape."""
    bits = values.to(tl.int32, bitcast=True)
    # The bits of negative floats order in reverse, so all but the sign are flipped. Both zeros are equal.
    ordered = tl.where(bits < 0, bits ^ NAN_KEY, bits)
    ordered = tl.where(values == 0.0, 0, ordered)
    ordered = tl.where(values != values, NAN_KEY, ordered)
    return (ordered.to(tl.int64) << 32) | (NAN_KEY - indices).to(tl.int64)


@triton.jit
def index_of(keys):
    """Return the i32 index that an i64 key contains."""
    return NAN_KEY - keys.to(tl.int32)


@triton.jit
def load_keys(logits, index, SIZE: tl.constexpr):
    """Return the keys of a row's elements at `index` i32; LEAST for an index of SIZE or more."""
    inside = index < SIZE
    values = tl.load(logits + index, mask=inside, other=0.0)
    return tl.where(inside, keys_of(values, index), LEAST)


@triton.jit
def best_of_chunks(
    logits, best, best_groups,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the largest key of each chunk of a row of logits [rows, SIZE] f32, and of each group.

    They are best [rows, CHUNKS] i64 and best_groups [rows, GROUPS] i64. A chunk has CHUNK elements. A
    workgroup handles TILE chunks, which are whole groups.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * TILE + tl.arange(0, TILE)
    index = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    largest = tl.max(load_keys(logits + row * SIZE, index, SIZE), axis=1)
    tl.store(best + row * CHUNKS + chunk, largest, mask=chunk < CHUNKS)
    group = tl.program_id(1) * (TILE // CHUNK) + tl.arange(0, TILE // CHUNK)
    of_groups = tl.max(tl.reshape(largest, (TILE // CHUNK, CHUNK)), axis=1)
    tl.store(best_groups + row * GROUPS + group, of_groups, mask=group < GROUPS)


@triton.jit
def best_of_row(
    logits, best, best_groups, values, indices,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the top K of logits [rows, SIZE] f32: descending values [rows, K] f32, indices [rows, K] i64.

    `best` and `best_groups` are as in `best_of_chunks`. If a row contains NaN, all its values are NaN. KEPT
    is K, rounded up to a power of two; BLOCK is GROUPS, also rounded up, or KEPT if that is more.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK)
    # If a row has fewer than KEPT groups or chunks, the remainder is LEAST. Its index is after the row's end.
    of_groups = tl.load(best_groups + row * GROUPS + group, mask=group < GROUPS, other=LEAST)
    chunk = parts_of(index_of(tl.topk(of_groups, KEPT)) // (CHUNK * CHUNK), CHUNK)
    of_chunks = tl.load(best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=LEAST)
    index = parts_of(index_of(tl.topk(of_chunks, KEPT)) // CHUNK, CHUNK)
    kept = tl.topk(load_keys(logits + row * SIZE, index, SIZE), KEPT)
    place = tl.arange(0, KEPT)
    wanted = place < K
    value = tl.load(logits + row * SIZE + index_of(kept), mask=wanted, other=0.0)
    holds_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    value = tl.where(holds_nan, float("nan"), value)
    tl.store(values + row * K + place, value, mask=wanted)
    tl.store(indices + row * K + place, index_of(kept).to(tl.int64), mask=wanted)


@triton.jit
def parts_of(whole, COUNT: tl.constexpr):
    """Return the indices of the COUNT parts of each of `whole` [N]: [N * COUNT]."""
    parts = whole[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    return tl.reshape(parts, (whole.shape[0] * COUNT,))
