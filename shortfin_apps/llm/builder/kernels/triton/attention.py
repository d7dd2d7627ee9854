"""Attention over the pages of a KV cache, for tokens packed end to end.

A workgroup takes a tile of up to TOKENS tokens of one row with all query heads of one K/V head, and passes
over the row's slots from the first on, COLUMNS at a time, with a running softmax (as in FlashAttention). In a
decode, workgroups take SPLIT slots each, and the last to finish combines what all of them found (as in
Flash-Decoding). What is combined, and in which order, depends on a row's length alone.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of_tile(offsets, rows, tile, TOKENS: tl.constexpr):
    """The last row whose first tile is at or before `tile`.

    Row r has tiles from offsets[r] // TOKENS + r on: as many as it needs, and none that is another's.
    """
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(offsets + middle).to(tl.int32) // TOKENS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend(
    q,
    cache,
    offsets,
    starts,
    seq_lens,
    blocks,
    counters,
    out,
    parts,
    states,
    tokens,
    rows,
    width,
    layer,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """out [tokens, HEADS * HEAD_DIM] of q, of that shape: softmax(q K / sqrt(HEAD_DIM)) V.

    `offsets`, `starts` and `seq_lens` [rows] i64 and `blocks` [rows, width] i64 are the batch's (see abi.py);
    the cache is rows as in qkv.py, PAGE_ROWS to a page. Padding gets zeros. BLOCK_DIM is HEAD_DIM and QUERIES
    TOKENS times a K/V head's query heads, rounded up to powers of two.

    With SPLIT (else 0) every row is one token, and `splits` workgroups share its slots. They leave what they
    found in `parts` [tokens, HEADS, splits, HEAD_DIM] f32 and `states` [tokens, HEADS, splits, 2] f32 (see
    `combine`), and count themselves in `counters` [tokens, KV_HEADS] i32, which is zero before and after.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    ROW: tl.constexpr = KV_HEADS * HEAD_DIM
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if SPLIT > 0:
        row = tile
        offset = tile
        begin = tile
        end = tile + 1
    else:
        row = row_of_tile(offsets, rows, tile, TOKENS)
        offset = tl.load(offsets + row).to(tl.int32)
        begin = offset + (tile - offset // TOKENS - row) * TOKENS
        end = tokens
        if row + 1 < rows:
            end = tl.load(offsets + row + 1).to(tl.int32)
    start = tl.load(starts + row).to(tl.int32)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    query = tl.arange(0, QUERIES)
    token = begin + query // SHARING
    head = kv_head * SHARING + query % SHARING
    is_query = (query < TOKENS * SHARING) & (token < end)
    position = start + token - offset
    # Slots that a query sees: none if it is padding.
    seen = tl.where(is_query & (position < seq_len), position + 1, 0)
    last = tl.max(seen, axis=0)
    first = 0
    shares = 1
    if SPLIT > 0:
        shares = tl.maximum(tl.cdiv(last, SPLIT), 1)
        first = tl.program_id(2) * SPLIT
        last = tl.minimum(last, first + SPLIT)
    if (begin < end) & ((first < last) | (first == 0)):
        dim = tl.arange(0, BLOCK_DIM)
        is_dim = dim < HEAD_DIM
        result = token.to(tl.int64) * HEADS + head
        written = is_query[:, None] & is_dim[None, :]
        queries = tl.load(q + result[:, None] * HEAD_DIM + dim[None, :], mask=written, other=0.0)
        table = blocks + tl.cast(row, tl.int64) * width
        peak = tl.full((QUERIES,), LOWEST, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES, BLOCK_DIM), tl.float32)
        for at in range(first, last, COLUMNS):
            slot = at + tl.arange(0, COLUMNS)
            exists = slot < last
            page = tl.load(table + slot // STRIDE, mask=exists, other=0)
            cache_row = page * PAGE_ROWS + layer * 2 * STRIDE + slot % STRIDE
            keys_at = cache + (cache_row * ROW + kv_head * HEAD_DIM)[:, None] + dim[None, :]
            kept = exists[:, None] & is_dim[None, :]
            keys = tl.load(keys_at, mask=kept, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            scores *= LOG2_E * HEAD_DIM**-0.5
            visible = slot[None, :] < seen[:, None]
            scores = tl.where(visible, scores, LOWEST)
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            powers = tl.where(visible, tl.exp2(scores - new_peak[:, None]), 0.0)
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(powers, axis=1)
            values = tl.load(keys_at + STRIDE * ROW, mask=kept, other=0.0)
            sums = tl.dot(powers.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
            peak = new_peak

        is_done = True
        if SPLIT > 0:
            if shares > 1:
                part = result * splits + tl.program_id(2)
                tl.store(states + part * 2, peak, mask=is_query)
                tl.store(states + part * 2 + 1, total, mask=is_query)
                tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], sums, mask=written)
                tl.debug_barrier()  # before the count says that all of it is there
                counter = counters + row * KV_HEADS + kv_head
                is_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == shares - 1
                if is_done:
                    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                    total, sums = combine(
                        parts, states, result * splits, shares, is_query, written, HEAD_DIM, BLOCK_DIM
                    )
        if is_done:
            sums = sums / tl.where(total > 0, total, 1.0)[:, None]
            out_at = out + result[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=written)


@triton.jit
def combine(parts, states, first, shares, is_query, written, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The sums of `shares` parts from `first` [QUERIES] on, in their order: the total of all weights' powers
    of two, and of the values that they weigh. A part's state is the peak of its weights, and their total.
    """
    dim = tl.arange(0, BLOCK_DIM)
    peak = tl.full(first.shape, LOWEST, tl.float32)
    total = tl.zeros(first.shape, tl.float32)
    sums = tl.zeros((first.shape[0], BLOCK_DIM), tl.float32)
    for share in range(shares):
        part = first + share
        part_peak = tl.load(states + part * 2, mask=is_query, other=LOWEST, cache_modifier=".cg")
        part_total = tl.load(states + part * 2 + 1, mask=is_query, other=0.0, cache_modifier=".cg")
        at = parts + part[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(at, mask=written, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, part_peak)
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(part_peak - new_peak)
        total = total * decay + part_total * weight
        sums = sums * decay[:, None] + values * weight[:, None]
        peak = new_peak
    return total, sums
