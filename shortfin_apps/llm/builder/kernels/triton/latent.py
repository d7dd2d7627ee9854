"""Latent attention (model/latent_attention.py) around its attention: matmuls by head, q and keys."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.cached_bytes import SCALE_BYTES, quantised_row, scales_of
from shortfin_apps.llm.builder.kernels.triton.qkv import rotated


@triton.jit
def multiply_heads(
    x, w, y, tokens,
    HEADS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, X_ROW: tl.constexpr, X_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr, W_FIRST: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply each head of x by its matrix: y [tokens, HEADS * OUT].

    A row of x has X_ROW elements; the IN elements of head h start at h * X_HEAD. Element (i, o) of its matrix
    is at W_FIRST + h * W_HEAD + i * W_IN + o * W_OUT of `w`. x is rounded to the type of w. A workgroup
    computes ROWS tokens by COLUMNS features of one head, DEPTH of IN in each step.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x + (row.to(tl.int64) * X_ROW + head * X_HEAD)[:, None]
    w_at = w + W_FIRST + head * W_HEAD + (column * W_OUT)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, IN, DEPTH):
        each = first + tl.arange(0, DEPTH)
        inside = each < IN
        values = tl.load(x_at + each[None, :], mask=(row < tokens)[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(
            w_at + (each * W_IN)[:, None], mask=inside[:, None] & (column < OUT)[None, :], other=0.0
        )
        sums = tl.dot(values.to(w.dtype.element_ty), matrix, sums, input_precision="ieee")
    y_at = y + (row.to(tl.int64) * (HEADS * OUT) + head * OUT)[:, None] + column[None, :]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=(row < tokens)[:, None] & (column < OUT)[None, :])


@triton.jit
def store_latent(
    queries, absorbed, joint, norm, rotary, slots, cache, q, layer,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PLAIN: tl.constexpr,
    QUERY_ROW: tl.constexpr, JOINT_ROW: tl.constexpr, SCALE: tl.constexpr, STRIDE: tl.constexpr,
    ROW: tl.constexpr, EPS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Write q [tokens, HEADS * (RANK + ROTATED)] times SCALE, and the tokens' keys to `cache`.

    A head of q is its part of `absorbed` [tokens, HEADS * RANK] f32, then its ROTATED last elements in
    `queries` [tokens, QUERY_ROW] f32, rotated. A key is the last RANK + ROTATED elements of a row of `joint`
    [tokens, JOINT_ROW] f32: the latent, RMS-normed with the weights `norm` [RANK], and elements to rotate.
    `rotary` [tokens, 2, ROTATED / 2] f32 holds cosines and sines. `slots` [tokens] i64 is the cache row of
    each token in layer 0; the row of the next layer is STRIDE rows after it. A cache row has ROW elements
    (see cached_bytes.py for bytes). A workgroup handles BLOCK_HEADS heads of one token, and the first one
    also the key. BLOCK_RANK and BLOCK_HALF are RANK and ROTATED / 2 rounded up to powers of two.
    """
    HALF: tl.constexpr = ROTATED // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    angle = tl.arange(0, BLOCK_HALF)
    dim = tl.arange(0, BLOCK_RANK)
    cosine = tl.load(rotary + token * ROTATED + angle, mask=angle < HALF, other=1.0)
    sine = tl.load(rotary + token * ROTATED + HALF + angle, mask=angle < HALF, other=0.0)

    head = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    exists = (head < HEADS)[:, None]
    in_rank, in_half = exists & (dim < RANK)[None, :], exists & (angle < HALF)[None, :]
    latents = tl.load(absorbed + token * (HEADS * RANK) + (head * RANK)[:, None] + dim[None, :], mask=in_rank)
    turning = queries + token * QUERY_ROW + (head * (PLAIN + ROTATED) + PLAIN)[:, None] + angle[None, :]
    low = tl.load(turning, mask=in_half, other=0.0)
    high = tl.load(turning + HALF, mask=in_half, other=0.0)
    q_at = q + (token * HEADS + head)[:, None] * (RANK + ROTATED)
    tl.store(q_at + dim[None, :], (latents * SCALE).to(q.dtype.element_ty), mask=in_rank)
    q_at += RANK + angle[None, :]
    turned_low, turned_high = rotated(low, high, cosine[None, :], sine[None, :])
    tl.store(q_at, (turned_low * SCALE).to(q.dtype.element_ty), mask=in_half)
    tl.store(q_at + HALF, (turned_high * SCALE).to(q.dtype.element_ty), mask=in_half)

    if group == 0:
        key = joint + token * JOINT_ROW + (JOINT_ROW - RANK - ROTATED)
        latent = tl.load(key + dim, mask=dim < RANK, other=0.0)
        latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + EPS)
        latent *= tl.load(norm + dim, mask=dim < RANK, other=0.0)
        low_key = tl.load(key + RANK + angle, mask=angle < HALF, other=0.0)
        high_key = tl.load(key + RANK + HALF + angle, mask=angle < HALF, other=0.0)
        turned_low_key, turned_high_key = rotated(low_key, high_key, cosine, sine)
        row = tl.load(slots + token) + layer * STRIDE
        if cache.dtype.element_ty == tl.int8:
            latent, turned_low_key, turned_high_key, scale = quantised_row(
                latent, turned_low_key, turned_high_key, dim < RANK, angle < HALF
            )
            tl.store(scales_of(cache, 1, RANK + ROTATED) + row * (ROW // SCALE_BYTES), scale)
        at = cache + row * ROW
        tl.store(at + dim, latent.to(cache.dtype.element_ty), mask=dim < RANK)
        tl.store(at + RANK + angle, turned_low_key.to(cache.dtype.element_ty), mask=angle < HALF)
        tl.store(at + RANK + HALF + angle, turned_high_key.to(cache.dtype.element_ty), mask=angle < HALF)
