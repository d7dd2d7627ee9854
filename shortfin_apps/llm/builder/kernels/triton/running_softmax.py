"""The running softmax of attention (as in FlashAttention), over slots of a KV cache's pages.

The state is three f32 tensors. `peak` [QUERIES] is the largest score so far, times log2(e). `total`
[QUERIES] is the sum of the softmax weights 2^(score * log2(e) - peak). `sums` [QUERIES, BLOCK_DIM] is the
sum of the values times these weights.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.cached_bytes import load_scales, scales_of
from shortfin_apps.llm.builder.kernels.triton.product import sums_of_neighbours

LOWEST = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def nothing(seen, queries):
    """Return the state of an empty softmax."""
    peak = tl.full(seen.shape, LOWEST, tl.float32)
    return peak, tl.zeros(seen.shape, tl.float32), tl.zeros(queries.shape, tl.float32)


@triton.jit
def merged(state, part):
    """Merge the softmax states `state` and `part`, in this order.

    If one of the two is empty, the result equals the other bit for bit.
    """
    peak, total, sums = state
    part_peak, part_total, part_sums = part
    new_peak = tl.maximum(peak, part_peak)
    decay, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
    total = tl.fma(total, decay, part_total * weight)
    return new_peak, total, tl.fma(part_sums, weight[:, None], sums * decay[:, None])


@triton.jit
def chosen(condition, state, other):
    """Select the softmax `state` for queries with a true `condition` [QUERIES], otherwise `other`."""
    peak = tl.where(condition, state[0], other[0])
    total = tl.where(condition, state[1], other[1])
    return peak, total, tl.where(condition[:, None], state[2], other[2])


@triton.jit
def attend_slots(
    queries, turned, seen, begin, first, shared, last, state, cache, table, layer, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr,
    ROW: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, TAIL: tl.constexpr,
    SHARES: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Attend from queries [QUERIES, BLOCK_DIM] to slots `first` to `last` - 1; return the updated `state`.

    A query attends to the first `seen` [QUERIES] slots or, with a WINDOW, to the last WINDOW of these. No
    query attends to slots before `begin`, as their pages may hold anything. `table` is the row of the block
    table for the sequence. With a TAIL, a key has TAIL elements after HEAD_DIM, which are multiplied by
    `turned` [QUERIES, BLOCK_TAIL], and its first HEAD_DIM elements are its value.

    Callers must choose `shared` so that every query attends to all slots from `first` to `shared` - 1,
    except queries that attend to none, whose results are then meaningless. The number of these slots must be
    a multiple of COLUMNS. These slots are processed without masks, which gives the same bits as with masks.

    With SHARES, the result has the bits that `attend_singles` computes for each query: one softmax state for
    each share of the slots, merged in order. `state` must be empty, and SPLIT a multiple of COLUMNS.
    STAGES: pipeline stages of the loads; None: those of the whole kernel.
    """
    peak, total, sums = state
    whole = state  # the merged states of complete shares
    base = tl.zeros(seen.shape, tl.int32)
    if WINDOW is not None:
        base = first_slot(seen, WINDOW, SPLIT)
    PLANES: tl.constexpr = 2 if TAIL is None else 1
    heads = cache
    scales = None
    if TAIL is None:
        heads += kv_head * HEAD_DIM
    if cache.dtype.element_ty == tl.int8:
        if TAIL is None:
            scales = scales_of(cache, KV_HEADS, HEAD_DIM) + kv_head
        else:
            scales = scales_of(cache, 1, HEAD_DIM + TAIL)
    for at in tl.range(first, shared, COLUMNS, num_stages=STAGES):
        slot = at + tl.arange(0, COLUMNS)
        key = key_row(table, slot, None, layer, STRIDE, PAGE_ROWS, PLANES)
        peak, total, sums = attend_columns(
            queries, turned, None, heads, scales, key, None, peak, total, sums,
            ROW, HEAD_DIM, STRIDE, CAP, TAIL,
        )  # fmt: skip
        if SHARES:
            whole, (peak, total, sums) = complete_share(
                whole, (peak, total, sums), seen, base, at + COLUMNS, last, SPLIT, MOST_SPLITS
            )
    for at in tl.range(shared, last, COLUMNS, num_stages=STAGES):
        slot = at + tl.arange(0, COLUMNS)
        exists = slot < last
        if WINDOW is not None:
            exists &= slot >= begin
        key = key_row(table, slot, exists, layer, STRIDE, PAGE_ROWS, PLANES)
        visible = slot[None, :] < seen[:, None]
        if WINDOW is not None:
            visible &= slot[None, :] + WINDOW >= seen[:, None]
        peak, total, sums = attend_columns(
            queries, turned, visible, heads, scales, key, exists, peak, total, sums,
            ROW, HEAD_DIM, STRIDE, CAP, TAIL,
        )  # fmt: skip
        if SHARES:
            whole, (peak, total, sums) = complete_share(
                whole, (peak, total, sums), seen, base, at + COLUMNS, last, SPLIT, MOST_SPLITS
            )
    if SHARES:
        return merged(whole, (peak, total, sums))
    else:
        return peak, total, sums


@triton.jit
def complete_share(whole, part, seen, base, end, last, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Merge `part` into `whole` for queries whose share ends at slot `end` < `last`; return both states.

    Shares of a query start at its slot `base`, and have SPLIT slots if MOST_SPLITS is None. An emptied `part`
    keeps its sums: the next step multiplies them by 2^(LOWEST - peak), which is 0.
    """
    if (end % SPLIT == 0) & (end < last):
        if MOST_SPLITS is None:
            whole = merged(whole, part)
            part = tl.full(seen.shape, LOWEST, tl.float32), tl.zeros_like(part[1]), part[2]
        else:
            is_end = (end - base) % slots_of_share(seen - base, SPLIT, MOST_SPLITS) == 0
            whole = chosen(is_end, merged(whole, part), whole)
            part = tl.where(is_end, LOWEST, part[0]), tl.where(is_end, 0.0, part[1]), part[2]
    return whole, part


@triton.jit
def first_slot(seen, WINDOW: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first of the last WINDOW of `seen` slots, rounded down to a multiple of COLUMNS."""
    return tl.maximum(seen - WINDOW, 0) // COLUMNS * COLUMNS


@triton.jit
def slots_of_share(slots, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Return the number of slots per workgroup, for a total of `slots`."""
    return SPLIT * tl.maximum(tl.cdiv(slots, SPLIT * MOST_SPLITS), 1)


@triton.jit
def attend_columns(
    queries, turned, visible, heads, scales, key, exists, peak, total, sums,
    ROW: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE: tl.constexpr, CAP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Run one step of `attend_slots`; return the new peak, total and sums.

    `key` [COLUMNS] are the cache rows of the keys, and `heads` is the address of this K/V head in row 0.
    `exists` [COLUMNS] marks the keys that exist, and `visible` [QUERIES, COLUMNS] the keys that a query
    attends to; None means all. `scales` are the scales of a cache in bytes, otherwise None.
    """
    keys_at = heads + (key * ROW)[:, None] + tl.arange(0, queries.shape[1])[None, :]
    keys = load_rows(keys_at, exists, HEAD_DIM).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if TAIL is not None:
        tails_at = heads + (key * ROW)[:, None] + HEAD_DIM + tl.arange(0, turned.shape[1])[None, :]
        tails = load_rows(tails_at, exists, TAIL).to(queries.dtype)
        scores = tl.dot(turned, tl.trans(tails), scores, input_precision="ieee")
    if scales is not None:
        scores *= load_scales(scales, key, exists, ROW)[None, :]
    scale = LOG2_E * HEAD_DIM**-0.5
    if CAP is not None:
        scores = tanh(scores * (HEAD_DIM**-0.5 / CAP))
        scale = LOG2_E * CAP
    powers, decay, peak, total = soften(scores, visible, scale, peak, total, queries.dtype == tl.float32)
    values = keys
    of_values = key
    if TAIL is None:
        values = load_rows(keys_at + STRIDE * ROW, exists, HEAD_DIM).to(queries.dtype)
        of_values = key + STRIDE
    if scales is not None:
        powers *= load_scales(scales, of_values, exists, ROW)[None, :]
        if visible is not None:
            powers = tl.where(visible, powers, 0.0)
    sums = tl.dot(powers.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
    return peak, total, sums


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)


@triton.jit
def load_rows(at, exists, HEAD_DIM: tl.constexpr):
    """Load the elements at addresses `at` [COLUMNS, BLOCK_DIM] of cache rows.

    The result is 0 at and after HEAD_DIM, and in rows that do not exist.
    """
    inside = tl.arange(0, at.shape[1])[None, :] < HEAD_DIM
    if exists is not None:
        return tl.load(at, mask=exists[:, None] & inside, other=0.0)
    if at.shape[1] == HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def key_row(table, slot, exists, layer, STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr, PLANES: tl.constexpr):
    """Return the cache rows of the keys in the slots `slot` of a sequence, [COLUMNS] i64.

    A layer has PLANES rows for each slot. Of two, the row of a value is STRIDE rows after the row of its key.
    """
    page = tl.load(table + slot // STRIDE, mask=exists, other=None if exists is None else 0)
    return page * PAGE_ROWS + layer * PLANES * STRIDE + slot % STRIDE


@triton.jit
def soften(scores, visible, scale, peak, total, IN_PAIRS: tl.constexpr):
    """Add `scores` [QUERIES, COLUMNS] times `scale` to a running softmax of base 2.

    Scores that are not `visible` are left out; None: all are visible. Returns the weights 2^(score * scale -
    new peak), the factor 2^(peak - new peak) of all earlier weights, the new peak and the new total.
    IN_PAIRS: see `sum_of_columns`. Products and sums are fused multiply-adds (one rounding), so that the
    bits are the same with and without a mask.
    """
    if visible is not None:
        scores = tl.where(visible, scores, LOWEST)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    powers = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    if visible is not None:
        powers = tl.where(visible, powers, 0.0)
    decay = tl.exp2(peak - new_peak)
    return powers, decay, new_peak, tl.fma(total, decay, sum_of_columns(powers, IN_PAIRS))


@triton.jit
def sum_of_columns(x, IN_PAIRS: tl.constexpr):
    """Sum x [QUERIES, COLUMNS] along columns; IN_PAIRS: in an order that does not depend on the layout.

    Without matrix instructions (RDNA in f32), each tile has its own layout, and so its own order in `tl.sum`.
    """
    if IN_PAIRS:
        return tl.reshape(sums_of_neighbours(x, x.shape[1]), (x.shape[0],))
    else:
        return tl.sum(x, axis=1)
