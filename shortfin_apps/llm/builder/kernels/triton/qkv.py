"""Queries, keys and values of tokens: projected, rotated, and keys and values written to the KV cache."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.product import normalised_product


@triton.jit
def project_qkv(
    x,
    in_squares,
    w,
    scales,
    minima,
    bias,
    rotary,
    slots,
    cache,
    q,
    tokens,
    layer,
    IN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """q [tokens, HEADS * HEAD_DIM], rotated, and rows of `cache`, from x [tokens, IN].

    w is [(HEADS + 2 * KV_HEADS) * HEAD_DIM, IN]: all queries, keys, values. `scales` and
    `minima` are of a w in blocks (see blocks.py), else None; `bias` has as many elements as w has rows, or is
    None. `rotary` [tokens, 2, HEAD_DIM / 2] f32 holds cosines and sines. The cache is rows of KV_HEADS *
    HEAD_DIM; `slots` [tokens] i64 is each token's in layer 0's keys; values lie STRIDE rows behind their
    keys, and the next layer's keys STRIDE rows behind those.

    A tile's columns are pairs of elements that rotate together: of a head's first half and of its second.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = COLUMNS // 2
    ALL_PAIRS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HALF
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(row, tokens - 1)
    first = tl.program_id(1) * PAIRS
    each = tl.arange(0, COLUMNS)
    of_column = tl.minimum(first + each // 2, ALL_PAIRS - 1)
    feature = of_column // HALF * HEAD_DIM + of_column % HALF + each % 2 * HALF
    sums = normalised_product(
        x, in_squares, w, scales, minima, row, tokens, feature, IN, GROUP, EPS, DEPTH, EARLY
    )
    if bias is not None:
        sums += tl.load(bias + feature)[None, :]
    low, high = tl.split(tl.reshape(sums, (ROWS, PAIRS, 2)))

    pair = first + tl.arange(0, PAIRS)
    head = pair // HALF
    angle = pair % HALF
    inside = (row < tokens)[:, None] & (pair < ALL_PAIRS)[None, :]
    turns = inside & (head < HEADS + KV_HEADS)[None, :]
    angles = rotary + own[:, None].to(tl.int64) * HEAD_DIM + angle[None, :]
    cosine = tl.load(angles, mask=turns, other=1.0)
    sine = tl.load(angles + HALF, mask=turns, other=0.0)
    turned_low = low * cosine - high * sine
    turned_high = high * cosine + low * sine

    q_at = q + own[:, None].to(tl.int64) * (HEADS * HEAD_DIM) + (head * HEAD_DIM + angle)[None, :]
    is_query = inside & (head < HEADS)[None, :]
    tl.store(q_at, turned_low.to(q.dtype.element_ty), mask=is_query)
    tl.store(q_at + HALF, turned_high.to(q.dtype.element_ty), mask=is_query)

    plane = (head - HEADS) // KV_HEADS  # 0 keys, 1 values
    cache_row = tl.load(slots + own)[:, None] + (layer * 2 + plane)[None, :] * STRIDE
    element = (head - HEADS) % KV_HEADS * HEAD_DIM + angle
    cache_at = cache + cache_row * (KV_HEADS * HEAD_DIM) + element[None, :]
    is_cached = inside & (head >= HEADS)[None, :]
    tl.store(cache_at, turned_low.to(cache.dtype.element_ty), mask=is_cached)
    tl.store(cache_at + HALF, turned_high.to(cache.dtype.element_ty), mask=is_cached)
