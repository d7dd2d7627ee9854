"""RMS norms of token rows, optionally with the addition of a residual; and the embedding of tokens."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.blocks import row_terms
from shortfin_apps.llm.builder.kernels.triton.product import store_scaled_row


@triton.jit
def rms_norm(x, weight, y, FEATURES: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Compute y [tokens, FEATURES] = x / rms(x) * weight [FEATURES] in f32; one token per workgroup."""
    rms_norm_token(tl.program_id(0).to(tl.int64), x, weight, y, FEATURES, BLOCK, EPS)


@triton.jit
def rms_norm_token(token, x, weight, y, FEATURES: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Compute a token's row of `rms_norm`."""
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    values = tl.load(x + token * FEATURES + feature, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / FEATURES + EPS)
    scaled = values * inverse * tl.load(weight + feature, mask=inside, other=0.0)
    tl.store(y + token * FEATURES + feature, scaled.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_normed(
    x, weight, residual, norm, y, scaled, squares, narrow,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Compute y [tokens, FEATURES] f32 = residual + x / rms(x) * weight; one token per workgroup.

    With `norm`, also writes `scaled` and `squares` for the next matmul. `narrow`, unless None, receives a
    copy of y in the type of `narrow`.
    """
    token = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    at = token.to(tl.int64) * FEATURES + feature
    values = tl.load(x + at, mask=inside, other=0.0)
    added = tl.load(residual + at, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / FEATURES + EPS)
    values = added + values * inverse * tl.load(weight + feature, mask=inside, other=0.0)
    tl.store(y + at, values, mask=inside)
    if narrow is not None:
        tl.store(narrow + at, values.to(narrow.dtype.element_ty), mask=inside)
    store_scaled_row(values, norm, scaled, squares, token, feature, inside, FEATURES, GROUP)


@triton.jit
def embed(
    ids, w, scales, minima, norm, x, scaled, squares,
    VOCAB: tl.constexpr, SCALE: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute x [tokens, FEATURES] f32: the rows `ids` [tokens] i64 of w [VOCAB, FEATURES], times SCALE.

    With `scales`, w is in BLOCKS of 8 bits (see blocks.py). A workgroup handles one token. Ids out of range
    read the last row. With `norm`, also writes `scaled` and `squares` for the first matmul.
    """
    embed_token(
        tl.program_id(0), ids, w, scales, minima, norm, x, scaled, squares,
        VOCAB, SCALE, FEATURES, BLOCK, GROUP, BLOCKS,
    )  # fmt: skip


@triton.jit
def embed_token(
    token, ids, w, scales, minima, norm, x, scaled, squares,
    VOCAB: tl.constexpr, SCALE: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a token's row of `embed`."""
    given = tl.load(ids + token)
    known = tl.where((given < 0) | (given >= VOCAB), VOCAB - 1, given)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    values = tl.load(w + known * FEATURES + feature, mask=inside, other=0).to(tl.float32)
    if scales is not None:
        values *= row_terms(scales, known, feature, inside, FEATURES, BLOCKS)
    if minima is not None:
        values += row_terms(minima, known, feature, inside, FEATURES, BLOCKS)
    values *= SCALE
    tl.store(x + token.to(tl.int64) * FEATURES + feature, values, mask=inside)
    store_scaled_row(values, norm, scaled, squares, token, feature, inside, FEATURES, GROUP)
