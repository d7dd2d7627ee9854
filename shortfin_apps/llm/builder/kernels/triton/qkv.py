"""q, k and v of tokens: projected and rotated; k and v are written to the KV cache."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.cached_bytes import SCALE_BYTES, quantised_pairs, scales_of
from shortfin_apps.llm.builder.kernels.triton.product import normalised_product, sums_of_neighbours


@triton.jit
def project_qkv(
    x, x_scales, in_squares, w, scales, minima, bias, head_norm, rotary, slots, cache, q, tokens, layer,
    IN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr, STRIDE: tl.constexpr, ROW: tl.constexpr, EPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Project x [tokens, IN]; write the rotated q [tokens, HEADS * HEAD_DIM], and k and v to `cache`.

    w is [(HEADS + 2 * KV_HEADS) * HEAD_DIM, IN]: rows of all queries, keys, values. `scales` and `minima`
    belong to a quantised w, as in linear.py. `bias` has an element per row of w, or is None. `head_norm` [2
    * HEAD_DIM], unless None, has the weights for heads of q, then for heads of k: heads are RMS-normed
    before the rotation, and a tile must have whole heads. `rotary` [tokens, 2, HEAD_DIM / 2] f32 holds the
    RoPE cosines and sines.

    A cache row has ROW elements: KV_HEADS * HEAD_DIM, or more in bytes (see cached_bytes.py), for which a
    tile must have whole heads too. `slots` [tokens] i64 is the cache row of each token's key in layer 0. A
    value is STRIDE rows after its key, and the key of the next layer STRIDE rows after that value.
    """
    project_qkv_tile(
        tl.program_id(0) * ROWS, tl.program_id(1) * (COLUMNS // 2),
        x, x_scales, in_squares, w, scales, minima, bias, head_norm, rotary, slots, cache, q, tokens, layer,
        IN, HEADS, KV_HEADS, HEAD_DIM, HEAD_COLUMNS, STRIDE, ROW, EPS, GROUP, BLOCKS, ROWS, COLUMNS, DEPTH,
        EARLY, PARTS,
    )  # fmt: skip


@triton.jit
def project_qkv_tile(
    first_row, first,
    x, x_scales, in_squares, w, scales, minima, bias, head_norm, rotary, slots, cache, q, tokens, layer,
    IN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr, STRIDE: tl.constexpr, ROW: tl.constexpr, EPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute the tile of `project_qkv` with COLUMNS / 2 pairs of columns, from the pair `first` on.

    A tile's columns are pairs of elements that rotate together, one of each half of a head. A head takes
    HEAD_COLUMNS columns, the last of which are empty if HEAD_DIM is smaller.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    HEAD_PAIRS: tl.constexpr = HEAD_COLUMNS // 2
    PAIRS: tl.constexpr = COLUMNS // 2
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    row = first_row + tl.arange(0, ROWS)
    own = tl.minimum(row, tokens - 1)
    each = tl.arange(0, COLUMNS)
    of_column = tl.minimum(first + each // 2, ALL_HEADS * HEAD_PAIRS - 1)
    in_head = tl.minimum(of_column % HEAD_PAIRS, HALF - 1) + each % 2 * HALF
    feature = of_column // HEAD_PAIRS * HEAD_DIM + in_head
    sums = normalised_product(
        x, x_scales, in_squares, w, scales, minima, row, tokens, feature,
        IN, GROUP, EPS, BLOCKS, DEPTH, EARLY, PARTS, STAGES,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + feature)[None, :]
    low, high = tl.split(tl.reshape(sums, (ROWS, PAIRS, 2)))

    pair = first + tl.arange(0, PAIRS)
    head = pair // HEAD_PAIRS
    angle = pair % HEAD_PAIRS
    exists = (head < ALL_HEADS) & (angle < HALF)
    if head_norm is not None:
        is_normed = exists & (head < HEADS + KV_HEADS)
        weight_at = head_norm + tl.where(head < HEADS, 0, HEAD_DIM) + angle
        low, high = _normed_heads(low, high, weight_at, exists, is_normed, HEAD_DIM, HEAD_PAIRS, EPS)
    inside = (row < tokens)[:, None] & exists[None, :]
    turns = inside & (head < HEADS + KV_HEADS)[None, :]
    angles = rotary + own[:, None].to(tl.int64) * HEAD_DIM + angle[None, :]
    cosine = tl.load(angles, mask=turns, other=1.0)
    sine = tl.load(angles + HALF, mask=turns, other=0.0)
    turned_low, turned_high = rotated(low, high, cosine, sine)

    q_at = q + own[:, None].to(tl.int64) * (HEADS * HEAD_DIM) + (head * HEAD_DIM + angle)[None, :]
    is_query = inside & (head < HEADS)[None, :]
    tl.store(q_at, turned_low.to(q.dtype.element_ty), mask=is_query)
    tl.store(q_at + HALF, turned_high.to(q.dtype.element_ty), mask=is_query)

    plane = (head - HEADS) // KV_HEADS  # 0 keys, 1 values
    cache_row = tl.load(slots + own)[:, None] + (layer * 2 + plane)[None, :] * STRIDE
    kv_head = (head - HEADS) % KV_HEADS
    cache_at = cache + cache_row * ROW + (kv_head * HEAD_DIM + angle)[None, :]
    is_cached = inside & (head >= HEADS)[None, :]
    if cache.dtype.element_ty == tl.int8:
        turned_low, turned_high, scale = quantised_pairs(turned_low, turned_high, inside, HEAD_PAIRS)
        scale_at = scales_of(cache, KV_HEADS, HEAD_DIM) + cache_row * (ROW // SCALE_BYTES) + kv_head[None, :]
        tl.store(scale_at, scale, mask=is_cached & (angle == 0)[None, :])
    tl.store(cache_at, turned_low.to(cache.dtype.element_ty), mask=is_cached)
    tl.store(cache_at + HALF, turned_high.to(cache.dtype.element_ty), mask=is_cached)


@triton.jit
def rotated(low, high, cosine, sine):
    """Rotate pairs of features, `low` and `high`, by angles; all shapes broadcast.

    Multiply-adds are fused explicitly: which products a compiler fuses may differ between kernels, and then a
    token's bits would depend on the batch that it is in.
    """
    low, cosine = tl.broadcast(low, cosine)
    high, sine = tl.broadcast(high, sine)
    return tl.fma(low, cosine, -(high * sine)), tl.fma(high, cosine, low * sine)


@triton.jit
def _normed_heads(
    low, high, weight_at, exists, is_normed,
    HEAD_DIM: tl.constexpr, HEAD_PAIRS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """RMS-norm the pairs `low` and `high` [ROWS, PAIRS] of whole heads where `is_normed` [PAIRS].

    Pairs outside `exists` [PAIRS] are ignored. `weight_at` [PAIRS] has the addresses of the weights of
    `low`; the weights of `high` are HEAD_DIM / 2 elements after.
    """
    ROWS: tl.constexpr = low.shape[0]
    PAIRS: tl.constexpr = low.shape[1]
    squares = tl.where(exists[None, :], tl.fma(low, low, high * high), 0.0)
    sums = sums_of_neighbours(squares, HEAD_PAIRS)
    inverse = tl.rsqrt(sums / HEAD_DIM + EPS)
    of_pair = tl.broadcast_to(inverse[:, :, None], (ROWS, PAIRS // HEAD_PAIRS, HEAD_PAIRS))
    scale = tl.where(is_normed[None, :], tl.reshape(of_pair, (ROWS, PAIRS)), 1.0)
    low_weight = tl.load(weight_at, mask=is_normed, other=1.0)
    high_weight = tl.load(weight_at + HEAD_DIM // 2, mask=is_normed, other=1.0)
    return low * scale * low_weight[None, :], high * scale * high_weight[None, :]


@triton.jit
def store_qkv(
    qkv, norm, rotary, slots, cache, q, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr,
    STRIDE: tl.constexpr, ROW: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate q and k of qkv [tokens, features] f32; write q, and k and v to `cache`.

    `q` and `cache` are as in `project_qkv`. If WHOLE, q and k are each RMS-normed over all heads, with
    weights `norm` [(HEADS + KV_HEADS) * HEAD_DIM]. Otherwise each head is RMS-normed, with weights `norm` [2
    * HEAD_DIM] for heads of q, then for heads of k. If GATED, there are gates with as many features as q
    between q and k, which are skipped. A workgroup handles one token. BLOCK_HALF, BLOCK_HEADS and
    BLOCK_KV_HEADS are HEAD_DIM / 2, HEADS and KV_HEADS rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    QUERIES: tl.constexpr = HEADS * HEAD_DIM
    BEFORE_KEYS: tl.constexpr = 2 * QUERIES if GATED else QUERIES
    qkv += token * (BEFORE_KEYS + 2 * KV_HEADS * HEAD_DIM)
    rotary += token * HEAD_DIM
    row = tl.load(slots + token) + layer * 2 * STRIDE
    q += token * QUERIES
    low, high = _turned(qkv, norm, rotary, HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_HEADS, WHOLE, EPS)
    _store_heads(low, high, q, HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_HEADS)
    qkv += BEFORE_KEYS
    norm += QUERIES if WHOLE else HEAD_DIM
    keys = cache + row * ROW
    low, high = _turned(qkv, norm, rotary, KV_HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_KV_HEADS, WHOLE, EPS)
    _store_heads(low, high, keys, KV_HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_KV_HEADS)
    qkv += KV_HEADS * HEAD_DIM
    at, inside = _halves(KV_HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_KV_HEADS)
    low = tl.load(qkv + at, mask=inside, other=0.0)
    high = tl.load(qkv + at + HEAD_DIM // 2, mask=inside, other=0.0)
    _store_heads(low, high, keys + STRIDE * ROW, KV_HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_KV_HEADS)


@triton.jit
def _turned(
    x, norm, rotary,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    WHOLE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads x [HEADS * HEAD_DIM] of a token.

    Returns the first and the second halves of the heads, [BLOCK_HEADS, BLOCK_HALF] each.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    at, inside = _halves(HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_HEADS)
    low = tl.load(x + at, mask=inside, other=0.0)
    high = tl.load(x + at + HALF, mask=inside, other=0.0)
    angle = tl.arange(0, BLOCK_HALF)
    squares = tl.sum(tl.fma(low, low, high * high), axis=1)
    if WHOLE:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / (HEADS * HEAD_DIM) + EPS)
        weight_at = norm + at
    else:
        inverse = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        weight_at = norm + tl.broadcast_to(angle[None, :], at.shape)
    low *= inverse * tl.load(weight_at, mask=inside, other=0.0)
    high *= inverse * tl.load(weight_at + HALF, mask=inside, other=0.0)
    cosine = tl.load(rotary + angle, mask=angle < HALF, other=1.0)[None, :]
    sine = tl.load(rotary + angle + HALF, mask=angle < HALF, other=0.0)[None, :]
    return rotated(low, high, cosine, sine)


@triton.jit
def _store_heads(
    low, high, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Store the halves of a token's heads to `out`: a row of q, or a cache row (quantised if in bytes)."""
    at, inside = _halves(HEADS, HEAD_DIM, BLOCK_HALF, BLOCK_HEADS)
    if out.dtype.element_ty == tl.int8:
        low, high, scale = quantised_pairs(low, high, inside, BLOCK_HALF)
        is_first = inside & (tl.arange(0, BLOCK_HALF) == 0)[None, :]
        scale_at = scales_of(out, HEADS, HEAD_DIM) + tl.arange(0, BLOCK_HEADS)[:, None]
        tl.store(tl.broadcast_to(scale_at, scale.shape), scale, mask=is_first)
    tl.store(out + at, low.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HEAD_DIM // 2, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _halves(HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return the offsets of the first halves of heads, [BLOCK_HEADS, BLOCK_HALF], and which of them exist."""
    head = tl.arange(0, BLOCK_HEADS)
    angle = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS)[:, None] & (angle < HEAD_DIM // 2)[None, :]
    return head[:, None] * HEAD_DIM + angle[None, :], inside
