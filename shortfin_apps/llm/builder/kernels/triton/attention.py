"""Attention over the pages of a KV cache, for tokens packed end to end.

`attend` gives a workgroup a tile of up to TOKENS tokens of one row with all query heads of one K/V head, and
passes over the row's slots from the first on, COLUMNS at a time, with a running softmax (as in
FlashAttention). `attend_singles` takes rows of one token, as in decodes: workgroups share a row's slots, and
the last to finish combines what all of them found (as in Flash-Decoding). What is combined, and in which
order, depends on a row's length alone.

Both read q [tokens, HEADS * HEAD_DIM] and write softmax(q K / sqrt(HEAD_DIM)) V of that shape to `out`;
padding gets zeros. With a WINDOW, a token sees only its last so many slots, itself included; with a CAP, a
score is CAP * tanh(score / CAP); `sinks` [HEADS] f32, if there are such, are scores of no slot that join the
softmax. `offsets`, `starts` and `seq_lens` [rows] i64 and `blocks` [rows, width] i64
are the batch's (see abi.py); the cache is rows as in qkv.py, PAGE_ROWS to a page, and may have more than 2^31
elements. Those in bytes are widened to q's type as they are loaded; scores are multiplied with the keys'
scales, weights with the values'. A tile has QUERIES queries, each a head of a token. BLOCK_DIM and
BLOCK_SPLITS are HEAD_DIM and MOST_SPLITS rounded up to a power of two.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.cached_bytes import load_scales, scales_of
from shortfin_apps.llm.builder.kernels.triton.tokens import row_at

LOWEST = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,
    cache,
    offsets,
    starts,
    seq_lens,
    blocks,
    sinks,
    out,
    tokens,
    rows,
    width,
    layer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    LEAVES_SINGLES: tl.constexpr,
):
    """Attention of tiles of TOKENS tokens; LEAVES_SINGLES leaves the token of a row that has one to
    `attend_singles`.

    Row r has tiles from offsets[r] // TOKENS + r on: as many as it needs, and none that is another's. The
    last ones begin first, as they tend to see the most slots.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    tile = tl.cdiv(tokens, TOKENS) + rows - 1 - tl.program_id(1)
    row = row_at(offsets, rows, tile, TOKENS, 1)
    offset, end = span_of(offsets, rows, row, tokens)
    begin = offset + (tile - offset // TOKENS - row) * TOKENS
    end = tl.minimum(end, begin + TOKENS)
    start = tl.load(starts + row).to(tl.int32)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    if LEAVES_SINGLES:
        # Padding may follow the token.
        begin += ((seq_len - start == 1) & (begin == offset)).to(tl.int32)
    if begin < end:
        query = tl.arange(0, QUERIES)
        token = begin + query // SHARING
        is_query = token < end
        position = start + token - offset
        # Slots that a query sees: none if it is padding.
        seen = tl.where(is_query & (position < seq_len), position + 1, 0)
        last = tl.max(seen, axis=0)
        # What the first token sees, unless all are padding.
        shared = tl.minimum(start + begin - offset + 1, last) // COLUMNS * COLUMNS
        first = 0
        if WINDOW is not None:
            first = first_slot(start + begin - offset + 1, WINDOW, COLUMNS)
            shared = first
        head = kv_head * SHARING + query % SHARING
        at = token.to(tl.int64) * HEADS + head
        peak, total, sums = attend_slots(
            load_heads(q, at, is_query, HEAD_DIM, BLOCK_DIM),
            seen,
            first,
            shared,
            last,
            cache,
            blocks + row.to(tl.int64) * width,
            layer,
            kv_head,
            KV_HEADS,
            HEAD_DIM,
            STRIDE,
            PAGE_ROWS,
            ROW,
            COLUMNS,
            WINDOW,
            CAP,
        )
        total = with_sinks(sinks, head, is_query, peak, total)
        store_heads(out, at, is_query, tl.where(seen > 0, total, 0.0), sums, HEAD_DIM)


@triton.jit
def attend_singles(
    q,
    cache,
    offsets,
    starts,
    seq_lens,
    blocks,
    sinks,
    counters,
    out,
    parts,
    states,
    tokens,
    rows,
    width,
    layer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Attention of rows of a single token, and of no others. Without `offsets` all rows have one.

    Workgroups share a row's slots: each takes SPLIT of them, or the least multiple for which MOST_SPLITS
    suffice. They leave what they found in `parts` [rows, HEADS, MOST_SPLITS, HEAD_DIM] f32 and `states`
    [rows, HEADS, MOST_SPLITS, 2] f32 (see `combine`), and count themselves in `counters` [rows, KV_HEADS]
    i32, which is zero before and after.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    share = tl.program_id(2)
    start = tl.load(starts + row).to(tl.int32)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    if offsets is None:
        token = row
        is_single = row < rows
    else:
        token, end = span_of(offsets, rows, row, tokens)
        is_single = (token < end) & (seq_len - start == 1)
    last = tl.where(start < seq_len, start + 1, 0)
    first = 0
    if WINDOW is not None:
        first = first_slot(last, WINDOW, COLUMNS)
    slots = SPLIT * tl.maximum(tl.cdiv(last - first, SPLIT * MOST_SPLITS), 1)
    shares = tl.maximum(tl.cdiv(last - first, slots), 1)
    if is_single & (share < shares):
        query = tl.arange(0, QUERIES)
        is_query = query < SHARING
        head = kv_head * SHARING + query
        at = token.to(tl.int64) * HEADS + head
        peak, total, sums = attend_slots(
            load_heads(q, at, is_query, HEAD_DIM, BLOCK_DIM),
            tl.where(is_query, last, 0),
            first + share * slots,
            first + share * slots,
            tl.minimum(last, first + (share + 1) * slots),
            cache,
            blocks + row.to(tl.int64) * width,
            layer,
            kv_head,
            KV_HEADS,
            HEAD_DIM,
            STRIDE,
            PAGE_ROWS,
            ROW,
            COLUMNS,
            WINDOW,
            CAP,
        )
        is_last = True
        if shares > 1:
            part = (row.to(tl.int64) * HEADS + head) * MOST_SPLITS
            store_part(parts, states, part + share, is_query, peak, total, sums, HEAD_DIM)
            is_last = is_last_of(shares, counters + row * KV_HEADS + kv_head)
            if is_last:
                peak, total, sums = combine(
                    parts, states, part, shares, is_query, HEAD_DIM, BLOCK_DIM, BLOCK_SPLITS
                )
        if is_last:
            total = with_sinks(sinks, head, is_query, peak, total)
            store_heads(out, at, is_query, total, sums, HEAD_DIM)


@triton.jit
def first_slot(seen, WINDOW: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the columns begin that hold the last WINDOW of `seen` slots."""
    return tl.maximum(seen - WINDOW, 0) // COLUMNS * COLUMNS


@triton.jit
def span_of(offsets, rows, row, tokens):
    """The first token of a row, and the first behind it."""
    end = tl.load(offsets + row + 1, mask=row + 1 < rows, other=tokens)
    return tl.load(offsets + row).to(tl.int32), end.to(tl.int32)


@triton.jit
def load_heads(x, at, is_query, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[QUERIES, BLOCK_DIM]: the heads `at` [QUERIES] of x [.., HEAD_DIM], zeros where there is no query."""
    dim = tl.arange(0, BLOCK_DIM)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(x + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)


@triton.jit
def store_heads(out, at, is_query, total, sums, HEAD_DIM: tl.constexpr):
    """The weighed values to the heads `at`: zeros where nothing was seen, of which the total is 0."""
    dim = tl.arange(0, sums.shape[1])
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.where((total > 0)[:, None], sums / total[:, None], 0.0)
    tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def with_sinks(sinks, head, is_query, peak, total):
    """The total [QUERIES] of powers relative to `peak`, with those of the sinks of each `head`, if there are
    such. A total of 0 stays that: its query saw nothing."""
    if sinks is None:
        return total
    else:
        sink = tl.load(sinks + head, mask=is_query, other=LOWEST) * LOG2_E
        return tl.where(total > 0, total + tl.exp2(sink - peak), total)


@triton.jit
def attend_slots(
    queries,
    seen,
    first,
    shared,
    last,
    cache,
    table,
    layer,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attention of queries [QUERIES, BLOCK_DIM] to slots `first` to `last` - 1 of those that each has `seen`,
    of which it sees the last WINDOW unless that is None.

    Slots `first` to `shared` - 1, a multiple of COLUMNS, are seen by all, but for queries that see none: they
    are attended without masks, to the same bits; what comes of queries that see none is of no use. `table` is
    the row's pages. Returns the state of a softmax to base 2, in f32: the peak of the weights [QUERIES], the
    sum of their powers [QUERIES], and the values weighed with these [QUERIES, BLOCK_DIM]; powers are relative
    to the peak.
    """
    peak = tl.full(seen.shape, LOWEST, tl.float32)
    total = tl.zeros(seen.shape, tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    heads = cache + kv_head * HEAD_DIM
    scales = None
    if cache.dtype.element_ty == tl.int8:
        scales = scales_of(cache, KV_HEADS, HEAD_DIM) + kv_head
    for at in range(first, shared, COLUMNS):
        slot = at + tl.arange(0, COLUMNS)
        key = key_row(table, slot, None, layer, STRIDE, PAGE_ROWS)
        peak, total, sums = attend_columns(
            queries, None, heads, scales, key, None, peak, total, sums, ROW, HEAD_DIM, STRIDE, CAP
        )
    begin = 0
    if WINDOW is not None:
        begin = tl.min(tl.where(seen > 0, seen, last)) - WINDOW  # of what is before, pages may hold anything
    for at in range(shared, last, COLUMNS):
        slot = at + tl.arange(0, COLUMNS)
        exists = slot < last
        if WINDOW is not None:
            exists &= slot >= begin
        key = key_row(table, slot, exists, layer, STRIDE, PAGE_ROWS)
        visible = slot[None, :] < seen[:, None]
        if WINDOW is not None:
            visible &= slot[None, :] + WINDOW >= seen[:, None]
        peak, total, sums = attend_columns(
            queries, visible, heads, scales, key, exists, peak, total, sums, ROW, HEAD_DIM, STRIDE, CAP
        )
    return peak, total, sums


@triton.jit
def attend_columns(
    queries,
    visible,
    heads,
    scales,
    key,
    exists,
    peak,
    total,
    sums,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    CAP: tl.constexpr,
):
    """One step of `attend_slots`, to the keys in rows `key` [COLUMNS] of `heads`.

    `exists` [COLUMNS] are those that are there, `visible` [QUERIES, COLUMNS] those that each query sees: all
    where they are None. `scales` are those of `heads` in bytes, else None. Returns the new peak, total and
    sums.
    """
    keys_at = heads + (key * ROW)[:, None] + tl.arange(0, queries.shape[1])[None, :]
    keys = load_rows(keys_at, exists, HEAD_DIM).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if scales is not None:
        scores *= load_scales(scales, key, exists, ROW)[None, :]
    scale = LOG2_E * HEAD_DIM**-0.5
    if CAP is not None:
        scores = tanh(scores * (HEAD_DIM**-0.5 / CAP))
        scale = LOG2_E * CAP
    powers, decay, peak, total = soften(scores, visible, scale, peak, total)
    values = load_rows(keys_at + STRIDE * ROW, exists, HEAD_DIM).to(queries.dtype)
    if scales is not None:
        powers *= load_scales(scales, key + STRIDE, exists, ROW)[None, :]
        if visible is not None:
            powers = tl.where(visible, powers, 0.0)
    sums = tl.dot(powers.to(values.dtype), values, sums * decay[:, None], input_precision="ieee")
    return peak, total, sums


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)


@triton.jit
def load_rows(at, exists, HEAD_DIM: tl.constexpr):
    """What is `at` [COLUMNS, BLOCK_DIM], zeros behind HEAD_DIM and in rows that do not exist."""
    inside = tl.arange(0, at.shape[1])[None, :] < HEAD_DIM
    if exists is not None:
        return tl.load(at, mask=exists[:, None] & inside, other=0.0)
    if at.shape[1] == HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def key_row(table, slot, exists, layer, STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """[COLUMNS] i64: the cache's rows with the keys of a row's slots; values lie STRIDE rows behind."""
    page = tl.load(table + slot // STRIDE, mask=exists, other=None if exists is None else 0)
    return page * PAGE_ROWS + layer * 2 * STRIDE + slot % STRIDE


@triton.jit
def soften(scores, visible, scale, peak, total):
    """One step of a running softmax: `scores` [QUERIES, COLUMNS] times `scale` join what `peak` and `total`
    stand for. Those that are not `visible` do not, unless that is None.

    Returns their powers of two, the factor of all before them, and the new peak and total. Products are
    rounded with the sums that they are in, so that the bits are the same whether there is a mask or not.
    """
    if visible is not None:
        scores = tl.where(visible, scores, LOWEST)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    powers = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    if visible is not None:
        powers = tl.where(visible, powers, 0.0)
    decay = tl.exp2(peak - new_peak)
    return powers, decay, new_peak, tl.fma(total, decay, tl.sum(powers, axis=1))


@triton.jit
def store_part(parts, states, part, is_query, peak, total, sums, HEAD_DIM: tl.constexpr):
    """What a workgroup found, for the one that combines: to `part` [QUERIES]."""
    tl.store(states + part * 2, peak, mask=is_query)
    tl.store(states + part * 2 + 1, total, mask=is_query)
    dim = tl.arange(0, sums.shape[1])
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], sums, mask=inside)


@triton.jit
def is_last_of(shares, counter):
    """Whether this workgroup is the last of `shares` to come here, which sees what the others stored."""
    tl.debug_barrier()  # before the count says that all of it is there
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == shares - 1
    if is_last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return is_last


@triton.jit
def combine(
    parts,
    states,
    first,
    shares,
    is_query,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """The sums of `shares` parts from `first` [QUERIES] on, in their order: the total of all weights' powers
    of two, and of the values that they weigh, relative to their peak, which is returned first. A part's state
    is the peak of its weights, and their total.
    """
    each = tl.arange(0, BLOCK_SPLITS)
    states_at = states + (first[:, None] + each[None, :]) * 2
    is_part = is_query[:, None] & (each < shares)[None, :]
    peaks = tl.load(states_at, mask=is_part, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(states_at + 1, mask=is_part, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, axis=1)
    total = tl.sum(totals * tl.exp2(peaks - peak[:, None]), axis=1)

    dim = tl.arange(0, BLOCK_DIM)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.zeros((first.shape[0], BLOCK_DIM), tl.float32)
    # Loads of several parts are in flight at once.
    for share in tl.range(shares, loop_unroll_factor=4):
        part = first + share
        part_peak = tl.load(states + part * 2, mask=is_query, other=LOWEST, cache_modifier=".cg")
        at = parts + part[:, None] * HEAD_DIM + dim[None, :]
        values = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        sums = tl.fma(values, tl.exp2(part_peak - peak)[:, None], sums)
    return peak, total, sums
