"""Attention over the pages of a KV cache, for tokens packed end to end.

`attend` gives a workgroup a tile of up to TOKENS tokens of one batch row, with all query heads of one K/V
head. The workgroup processes the sequence's slots from the first on, COLUMNS at a time, with a running
softmax (as in FlashAttention). `attend_singles` handles batch rows of one token, as in decodes: several
workgroups share the slots of a sequence, and the last to finish combines their partial results (as in
Flash-Decoding). The partial results, and the order of combining them, depend only on the sequence's length.
With SHARES, `attend` combines the same partial results in the same order, so that both kernels compute the
same bits for a token. Its MOST_SPLITS is None if no share has more than SPLIT slots.

Both kernels read q [tokens, HEADS * HEAD_DIM], and write softmax(q K / sqrt(HEAD_DIM)) V of the same shape
to `out`; the output of padding is zeros. With a WINDOW, a token attends only to the last WINDOW slots,
including its own. With a CAP, a score is CAP * tanh(score / CAP). `sinks` [HEADS] f32, unless None, are
additional scores of the softmax without a slot. `offsets`, `starts` and `seq_lens` [rows] i64 and `blocks`
[rows, width] i64 describe the batch (see abi.py).

The cache has rows as in qkv.py, PAGE_ROWS per page, and may have more than 2^31 elements. Cache rows in
bytes are widened to the type of q when they are loaded; scores are multiplied by the scales of keys, softmax
weights by those of values. A tile has QUERIES queries; a query is one head of one token. BLOCK_DIM is
HEAD_DIM rounded up to a power of two.

With a TAIL (latent attention), heads of q and keys have HEAD_DIM + TAIL elements, and a value is the first
HEAD_DIM elements of its key. There is one key for all heads; a K/V head is then only a group of query heads.
BLOCK_TAIL is TAIL rounded up to a power of two.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.running_softmax import (
    LOG2_E,
    LOWEST,
    attend_slots,
    first_slot,
    merged,
    nothing,
    slots_of_share,
)
from shortfin_apps.llm.builder.kernels.triton.synchronisation import is_last_of
from shortfin_apps.llm.builder.kernels.triton.tokens import row_at


@triton.jit
def attend(
    q, cache, offsets, starts, seq_lens, blocks, sinks, out, tokens, rows, width, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr, ROW: tl.constexpr, TOKENS: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    LEAVES_SINGLES: tl.constexpr, SHARES: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Attend for tiles of TOKENS tokens; with LEAVES_SINGLES, skip rows of one token (see `attend_singles`).

    The first tile of row r has the number offsets[r] // TOKENS + r, so that no two rows share a tile. The
    last tiles run first, as they tend to attend to the most slots.
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
        # The row may have padding after the single token.
        begin += ((seq_len - start == 1) & (begin == offset)).to(tl.int32)
    if begin < end:
        query = tl.arange(0, QUERIES)
        token = begin + query // SHARING
        is_query = token < end
        position = start + token - offset
        # Number of slots that each query attends to: 0 for padding.
        seen = tl.where(is_query & (position < seq_len), position + 1, 0)
        last = tl.max(seen, axis=0)
        # Slots that all queries attend to: the first token's in the tile, or none if all are padding.
        shared = tl.minimum(start + begin - offset + 1, last) // COLUMNS * COLUMNS
        first = 0
        if WINDOW is not None:
            first = first_slot(start + begin - offset + 1, WINDOW, COLUMNS)
            shared = first
        head = kv_head * SHARING + query % SHARING
        at = token.to(tl.int64) * HEADS + head
        begin = 0  # first slot that any query attends to
        if WINDOW is not None:
            begin = tl.min(tl.where(seen > 0, seen, last)) - WINDOW
        queries, turned = load_queries(q, at, is_query, HEAD_DIM, BLOCK_DIM, TAIL, BLOCK_TAIL)
        table = blocks + row.to(tl.int64) * width
        peak, total, sums = attend_slots(
            queries, turned, seen, begin, first, shared, last, nothing(seen, queries), cache, table,
            layer, kv_head,
            KV_HEADS, HEAD_DIM, STRIDE, PAGE_ROWS, ROW, COLUMNS, WINDOW, CAP, TAIL, SHARES, SPLIT,
            MOST_SPLITS,
        )  # fmt: skip
        total = with_sinks(sinks, head, is_query, peak, total)
        store_heads(out, at, is_query, tl.where(seen > 0, total, 0.0), sums, HEAD_DIM)


@triton.jit
def attend_singles(
    q, cache, offsets, starts, seq_lens, blocks, sinks, counters, out, parts, states, tokens, rows, width,
    layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr, ROW: tl.constexpr, QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SHARES: tl.constexpr, SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Attend for rows of a single token only; without `offsets`, all rows have one token.

    Several workgroups share a sequence's slots: each has a share of SPLIT slots, or of the smallest multiple
    with which MOST_SPLITS workgroups suffice. With SHARES, shares start at a multiple of SPLIT. If a
    sequence has several shares, workgroups store partial results in `parts` [rows, HEADS, MOST_SPLITS,
    HEAD_DIM] f32 and `states` [rows, HEADS, MOST_SPLITS, 2] f32 (see `combine`), and count themselves in
    `counters` [rows, KV_HEADS] i32. `counters` must be zero before a launch, and is zero after it.
    """
    attend_share(
        tl.program_id(1), tl.program_id(0), tl.program_id(2),
        q, cache, offsets, starts, seq_lens, blocks, sinks, counters, out, parts, states, tokens, rows, width,
        layer,
        HEADS, KV_HEADS, HEAD_DIM, BLOCK_DIM, STRIDE, PAGE_ROWS, ROW, QUERIES, COLUMNS, WINDOW, CAP, SHARES,
        SPLIT, MOST_SPLITS, TAIL, BLOCK_TAIL,
    )  # fmt: skip


@triton.jit
def attend_share(
    row, kv_head, share,
    q, cache, offsets, starts, seq_lens, blocks, sinks, counters, out, parts, states, tokens, rows, width,
    layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STRIDE: tl.constexpr, PAGE_ROWS: tl.constexpr, ROW: tl.constexpr, QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SHARES: tl.constexpr, SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute the share of `attend_singles` with this number, of a row and a K/V head.

    STAGES is as in `attend_slots`.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    token, last, is_single = single_of(offsets, starts, seq_lens, rows, row, tokens)
    first = 0
    if WINDOW is not None:
        first = first_slot(last, WINDOW, COLUMNS)
    base = first
    if SHARES:
        base = first // SPLIT * SPLIT
    slots = slots_of_share(last - base, SPLIT, MOST_SPLITS)
    shares = tl.maximum(tl.cdiv(last - base, slots), 1)
    if is_single & (share < shares):
        query = tl.arange(0, QUERIES)
        is_query = query < SHARING
        head = kv_head * SHARING + query
        at = token.to(tl.int64) * HEADS + head
        # The first share starts at `base`, which may be before `first`.
        begin = tl.maximum(first, base + share * slots)
        queries, turned = load_queries(q, at, is_query, HEAD_DIM, BLOCK_DIM, TAIL, BLOCK_TAIL)
        seen = tl.where(is_query, last, 0)
        peak, total, sums = attend_slots(
            queries, turned, seen, last - WINDOW if WINDOW is not None else 0, begin, begin,
            tl.minimum(last, base + (share + 1) * slots), nothing(seen, queries), cache,
            blocks + row.to(tl.int64) * width, layer, kv_head,
            KV_HEADS, HEAD_DIM, STRIDE, PAGE_ROWS, ROW, COLUMNS, WINDOW, CAP, TAIL, False, SPLIT, MOST_SPLITS,
            STAGES,
        )  # fmt: skip
        is_last = True
        if shares > 1:
            part = (row.to(tl.int64) * HEADS + head) * MOST_SPLITS
            dim = tl.arange(0, BLOCK_DIM)[None, :]
            inside = is_query[:, None] & (dim < HEAD_DIM)
            store_part(parts, states, part + share, (peak, total, sums), is_query, dim, inside, HEAD_DIM)
            is_last = is_last_of(shares, counters + row * KV_HEADS + kv_head)
            if is_last:
                peak, total, sums = combine(parts, states, part, shares, is_query, HEAD_DIM, BLOCK_DIM)
        if is_last:
            total = with_sinks(sinks, head, is_query, peak, total)
            store_heads(out, at, is_query, total, sums, HEAD_DIM)


@triton.jit
def single_of(offsets, starts, seq_lens, rows, row, tokens):
    """Return a row's token, its number of slots (0 for padding), and whether the row has no other token."""
    start = tl.load(starts + row).to(tl.int32)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    if offsets is None:
        token = row
        is_single = row < rows
    else:
        token, end = span_of(offsets, rows, row, tokens)
        is_single = (token < end) & (seq_len - start == 1)
    return token, tl.where(start < seq_len, start + 1, 0), is_single


@triton.jit
def span_of(offsets, rows, row, tokens):
    """Return the index of a row's first token, and of the first token after the row."""
    end = tl.load(offsets + row + 1, mask=row + 1 < rows, other=tokens)
    return tl.load(offsets + row).to(tl.int32), end.to(tl.int32)


@triton.jit
def load_queries(
    q, at, is_query, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Load the heads `at` [QUERIES] of q; zeros if not `is_query`.

    Returns [QUERIES, BLOCK_DIM] and, of heads with a TAIL, [QUERIES, BLOCK_TAIL] of it, otherwise None.
    """
    if TAIL is None:
        return load_heads(q, at, is_query, HEAD_DIM, BLOCK_DIM), None
    else:
        heads = q + at[:, None] * (HEAD_DIM + TAIL)
        dim, of_tail = tl.arange(0, BLOCK_DIM)[None, :], tl.arange(0, BLOCK_TAIL)[None, :]
        queries = tl.load(heads + dim, mask=is_query[:, None] & (dim < HEAD_DIM), other=0.0)
        inside = is_query[:, None] & (of_tail < TAIL)
        return queries, tl.load(heads + HEAD_DIM + of_tail, mask=inside, other=0.0)


@triton.jit
def load_heads(x, at, is_query, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load the heads `at` [QUERIES] of x [.., HEAD_DIM]: [QUERIES, BLOCK_DIM], zeros if not `is_query`."""
    dim = tl.arange(0, BLOCK_DIM)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(x + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)


@triton.jit
def store_heads(out, at, is_query, total, sums, HEAD_DIM: tl.constexpr):
    """Store sums / total to the heads `at` of `out`; zeros if total is 0 (a query without slots)."""
    dim = tl.arange(0, sums.shape[1])
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.where((total > 0)[:, None], sums / total[:, None], 0.0)
    tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def with_sinks(sinks, head, is_query, peak, total):
    """Return `total` [QUERIES] plus the softmax weight of each head's sink, relative to `peak`.

    `total` is unchanged without `sinks`, and for queries with a total of 0 (without slots).
    """
    if sinks is None:
        return total
    else:
        sink = tl.load(sinks + head, mask=is_query, other=LOWEST) * LOG2_E
        return tl.where(total > 0, total + tl.exp2(sink - peak), total)


@triton.jit
def store_part(parts, states, part, state, is_query, dim, inside, HEAD_DIM: tl.constexpr):
    """Store a workgroup's partial result, the softmax `state`, with index `part` [QUERIES].

    `dim` [1, BLOCK_DIM] counts elements of a head, of which those `inside` [QUERIES, BLOCK_DIM] are stored.
    """
    tl.store(states + part * 2, state[0], mask=is_query)
    tl.store(states + part * 2 + 1, state[1], mask=is_query)
    tl.store(parts + part[:, None] * HEAD_DIM + dim, state[2], mask=inside)


@triton.jit
def load_part(parts, states, part, is_query, dim, inside, HEAD_DIM: tl.constexpr):
    """Load what `store_part` stored, maybe in another workgroup, after `is_last_of`."""
    peak = tl.load(states + part * 2, mask=is_query, other=LOWEST, cache_modifier=".cg")
    total = tl.load(states + part * 2 + 1, mask=is_query, other=0.0, cache_modifier=".cg")
    at = parts + part[:, None] * HEAD_DIM + dim
    return peak, total, tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def combine(parts, states, first, shares, is_query, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Merge `shares` partial results, from index `first` [QUERIES] on and in order, to one softmax state.

    `states` has the peak and total of each partial result, `parts` its sums.
    """
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    inside = is_query[:, None] & (dim < HEAD_DIM)
    state = nothing(first, tl.zeros((first.shape[0], BLOCK_DIM), tl.float32))
    # Unrolled, so that loads of several partial results are in flight.
    for share in tl.range(shares, loop_unroll_factor=4):
        part = load_part(parts, states, first + share, is_query, dim, inside, HEAD_DIM)
        state = merged(state, part)
    return state
