"""Attention over a sequence's cache, with rotated keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.reference.pointwise import capped, rms_norm
from shortfin_apps.llm.model.reference.rotary import rotate
from shortfin_apps.llm.model.spec import ModelSpec

F32 = npt.NDArray[np.float32]


def projected(spec: ModelSpec, block: Attention, x: F32, weights: Mapping[str, F32]) -> F32:
    """Project to q, k and v before the rotation: [tokens, heads, head_dim]."""
    weight, queries = weights["attn_qkv.weight"], block.q_features
    if block.gate:
        weight = np.delete(weight, slice(queries, 2 * queries), axis=0)
    qkv = x @ weight.T + weights.get("attn_qkv.bias", 0)
    if block.whole_qk_norm:
        whole = weights["attn_qk_norm.weight"]
        borders = [block.q_features, len(whole)]
        q, k, v = np.split(qkv, borders, axis=1)
        q_weight, k_weight = np.split(whole, borders[:1])
        qkv = np.concatenate([rms_norm(spec, q, q_weight), rms_norm(spec, k, k_weight), v], axis=1)
    qkv = qkv.reshape(len(x), -1, block.head_dim)
    if block.qk_norm:
        heads, kv_heads = block.heads, block.kv_heads
        norms = np.repeat(weights["attn_qk_norm.weight"].reshape(2, -1), [heads, kv_heads], axis=0)
        qkv[:, : heads + kv_heads] = rms_norm(spec, qkv[:, : heads + kv_heads], norms)
    return qkv


def gates(block: Attention, x: F32, weights: Mapping[str, F32]) -> F32:
    queries = block.q_features
    if not block.gate:
        return np.ones(1, np.float32)
    gates: F32 = 1 / (1 + np.exp(-x @ weights["attn_qkv.weight"][queries : 2 * queries].T))
    return gates


def quantised_heads(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Quantise x [.., head_dim] to 8 bits; return it and the heads' scales [..]: largest magnitude / 127."""
    scales = np.abs(x).max(axis=-1) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(x / divisors).astype(np.int8), scales


def dequantised_heads(quants: npt.NDArray[np.int8], scales: F32) -> F32:
    x: F32 = quants.astype(np.float32) * scales[..., None]
    return x


def rotated_qkv(block: Attention, qkv: F32, cos: F32, sin: F32) -> tuple[F32, F32, F32]:
    heads, kv_heads = block.heads, block.kv_heads
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def attention(block: Attention, q: F32, k: F32, v: F32, past: F32, sinks: F32 | None) -> F32:
    tokens, heads, kv_heads, dim = len(q), block.heads, block.kv_heads, block.head_dim
    k, v = (np.concatenate(pair) for pair in zip(past, (k, v), strict=True))
    k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
    scores = capped(np.einsum("qhd,khd->hqk", q, k) / np.float32(dim**0.5), block.cap)
    visible = np.tri(tokens, len(k), len(k) - tokens, dtype=bool)
    if block.window is not None:
        visible &= ~np.tri(tokens, len(k), len(k) - tokens - block.window, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - peak)
    p /= p.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - peak))
    out: F32 = np.einsum("hqk,khd->qhd", p, v).reshape(tokens, heads * dim)
    return out
