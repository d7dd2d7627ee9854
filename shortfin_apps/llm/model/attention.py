"""Attention: its parameters, operations and numpy reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.block import Block, CachedTokens, ReferenceLayer
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.operations import (
    AddBias,
    AddNormed,
    Linear,
    ModelTensor,
    Operation,
    PagedOperation,
    norm_before,
)
from shortfin_apps.llm.model.reference.pointwise import F32, capped, rms_norm
from shortfin_apps.llm.model.reference.rotary import rotary, rotate
from shortfin_apps.llm.model.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Multiplies q at position p by 1 + beta * log(1 + floor(p / period)), as in Llama 4 and Ministral 3."""

    beta: float
    period: int  # tokens; the factor of the first `period` positions is 1

    def factors(self, start: int, tokens: int) -> F32:
        """Return the factors [tokens] of the positions from `start` on."""
        periods = np.arange(start, start + tokens) // self.period
        return (1 + self.beta * np.log(1 + periods)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Block):
    """Grouped-query attention with a residual connection: `heads` query heads, `kv_heads` key/value heads.

    Rows of q and k are in the half-split rotary order: elements i and i + head_dim / 2 of a head form a
    rotated pair. If only some elements rotate, they are the first ones of each half.
    """

    KIND: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None  # None: q and k are not rotated
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it; None: to all
    sinks: bool = False  # the softmax of each head has an extra learned score, whose value vector is 0
    cap: float | None = None  # scores are cap * tanh(score / cap)
    score_scale: float = 1.0  # multiplies scores, in addition to 1 / sqrt(head_dim)
    query_scaling: QueryScaling | None = None
    qk_norm: bool = False  # RMS norm of each head of q and k before rotation
    whole_qk_norm: bool = False  # RMS norm over all heads of q, and of k
    value_norm: bool = False  # RMS norm of each head of v, without weights
    keys_as_values: bool = False  # v is k before its norm and rotation
    is_shared: bool = False  # other layers read k and v (SharedAttention); needs `qk_norm` and `value_norm`
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    gate: bool = False  # heads' outputs are multiplied by sigmoid(gates); q's projection includes the gates
    norm_before: bool = True
    norm_after: bool = False  # norm of the output before the residual addition
    fused_qkv: bool = False  # the source has one tensor for q, k and v

    @property
    def q_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_features(self) -> int:
        return self.q_features + 2 * self.kv_features

    @property
    def read_layout(self) -> KeysValues:
        """The layout of the keys and values that it reads."""
        return KeysValues(self.kv_heads, self.head_dim, self.window)

    @property
    def kv_layout(self) -> KeysValues | None:
        return self.read_layout

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.head_dim, self.rope, self.score_scale)

    @property
    def attended_features(self) -> int:
        return self.q_features

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {}  # heads may have any size

    def within(self, context: int) -> Attention:
        """Return the block without the window and the scaling that `context` tokens stay within."""
        window, scaling = self.window, self.query_scaling
        return replace(
            self,
            window=None if window is None or window >= context else window,
            query_scaling=None if scaling is None or scaling.period >= context else scaling,
        )

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; q, k and v are stacked."""
        if self.norm_before:
            yield ModelTensor("attn_norm.weight", (hidden,))
        values = "attn_k" if self.keys_as_values else "attn_v"
        sizes = [("attn_q", (1 + self.gate) * self.q_features)]
        sizes += [(name, self.kv_features) for name in ("attn_k", values)]
        if self.fused_qkv:
            yield ModelTensor("attn_qkv.weight", (self.qkv_features, hidden))
        else:
            for name, features in sizes:
                yield ModelTensor(f"{name}.weight", (features, hidden), "attn_qkv.weight")
        if self.bias:
            for name, features in sizes:
                yield ModelTensor(f"{name}.bias", (features,), "attn_qkv.bias")
        if self.qk_norm or self.whole_qk_norm:
            whole = (self.q_features, self.kv_features)
            normed = zip("qk", whole if self.whole_qk_norm else 2 * (self.head_dim,), strict=True)
            for name, features in normed:
                yield ModelTensor(f"attn_{name}_norm.weight", (features,), "attn_qk_norm.weight")
        if self.sinks:
            yield ModelTensor("attn_sinks.weight", (self.heads,))
        yield ModelTensor("attn_output.weight", (hidden, self.q_features))
        if self.output_bias:
            yield ModelTensor("attn_output.bias", (hidden,))
        if self.norm_after:
            yield ModelTensor("post_attention_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}attn_norm.weight" if self.norm_before else None)
        yield Linear("normed", "gated_qkv" if self.gate else "qkv", f"{prefix}attn_qkv.weight")
        if self.gate:
            yield DropGates("gated_qkv", "qkv", self)
        if self.bias:
            yield AddBias("qkv", "qkv", f"{prefix}attn_qkv.bias")
        kept = kept_qkv(layer) if self.is_shared else "qkv"
        if self.value_norm:
            yield NormValues("qkv", kept, self)
        if self.qk_norm:
            yield NormHeads(kept, "qkv", f"{prefix}attn_qk_norm.weight", self)
        if self.whole_qk_norm:
            yield NormWhole("qkv", "qkv", f"{prefix}attn_qk_norm.weight", self)
        if self.query_scaling:
            yield ScaleQueries("qkv", "qkv", self.query_scaling, self.q_features)
        yield Attend("qkv", "attended", layer, self, f"{prefix}attn_sinks.weight" if self.sinks else None)
        if self.gate:
            yield Gate("attended", "attended", "gated_qkv")
        projected, residual = ("projected", None) if self.norm_after else (out, x)
        yield Linear("attended", projected, f"{prefix}attn_output.weight", residual)
        if self.output_bias:
            yield AddBias(projected, projected, f"{prefix}attn_output.bias")
        if self.norm_after:
            yield AddNormed(projected, out, f"{prefix}post_attention_norm.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        return self.attended(layer.normed(x, "attn_norm.weight"), layer)

    def attended(self, h: F32, layer: ReferenceLayer) -> F32:
        """Compute in numpy the block's addition, given the input of the projection to q, k and v."""
        weights, past = layer.weights, layer.past
        past = np.zeros((2, 0, self.kv_heads, self.head_dim), np.float32) if past is None else past
        q, k, v = np.split(self._projected(h, layer), [self.heads, self.heads + self.kv_heads], axis=1)
        turns = rotary(self.rotation, past.shape[1], len(h), layer.max_position_embeddings)
        q, k = rotate(q, *turns), rotate(k, *turns)
        if self.query_scaling:
            q = q * self.query_scaling.factors(past.shape[1], len(h))[:, None, None]
        if layer.has_quantised_cache:
            k, v = (dequantised_heads(*quantised_heads(each)) for each in (k, v))
        layer.cached = CachedTokens(k, v)
        if self.is_shared:
            layer.carried.keys_values[layer.number] = past, k, v
        attended = self._attended(q, k, v, past, weights.get("attn_sinks.weight"))
        if self.gate:
            gates = weights["attn_qkv.weight"][self.q_features : 2 * self.q_features]
            attended *= 1 / (1 + np.exp(-h @ gates.T))
        added: F32 = attended @ weights["attn_output.weight"].T
        added += weights.get("attn_output.bias", np.float32(0))
        return layer.normed(added, "post_attention_norm.weight")

    def _projected(self, h: F32, layer: ReferenceLayer) -> F32:
        """Return q, k and v before the rotation: [tokens, heads + 2 * kv_heads, head_dim]."""
        weights, eps = layer.weights, layer.rms_norm_eps
        weight, queries = weights["attn_qkv.weight"], self.q_features
        if self.gate:
            weight = np.delete(weight, slice(queries, 2 * queries), axis=0)
        qkv = h @ weight.T + weights.get("attn_qkv.bias", 0)
        if self.whole_qk_norm:
            whole = weights["attn_qk_norm.weight"]
            borders = [queries, len(whole)]
            q, k, v = np.split(qkv, borders, axis=1)
            q_weight, k_weight = np.split(whole, borders[:1])
            qkv = np.concatenate([rms_norm(eps, q, q_weight), rms_norm(eps, k, k_weight), v], axis=1)
        qkv = qkv.reshape(len(h), -1, self.head_dim)
        heads, kv_heads = self.heads, self.kv_heads
        if self.value_norm:
            qkv[:, heads + kv_heads :] = rms_norm(eps, qkv[:, heads + kv_heads :], np.float32(1))
        if self.qk_norm:
            norms = np.repeat(weights["attn_qk_norm.weight"].reshape(2, -1), [heads, kv_heads], axis=0)
            qkv[:, : heads + kv_heads] = rms_norm(eps, qkv[:, : heads + kv_heads], norms)
        return qkv

    def _attended(self, q: F32, k: F32, v: F32, past: F32, sinks: F32 | None) -> F32:
        tokens, heads, kv_heads, dim = len(q), self.heads, self.kv_heads, self.head_dim
        k, v = (np.concatenate(pair) for pair in zip(past, (k, v), strict=True))
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = capped(np.einsum("qhd,khd->hqk", q, k) / np.float32(dim**0.5), self.cap)
        visible = np.tri(tokens, len(k), len(k) - tokens, dtype=bool)
        if self.window is not None:
            visible &= ~np.tri(tokens, len(k), len(k) - tokens - self.window, dtype=bool)
        scores = np.where(visible, scores, -np.inf)
        peak = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - peak)
        p /= p.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - peak))
        out: F32 = np.einsum("hqk,khd->qhd", p, v).reshape(tokens, heads * dim)
        return out


def kept_qkv(layer: int) -> str:
    """Return the name of the value with k, before its norm, and v, which other layers read."""
    return f"qkv.{layer}"


def quantised_heads(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Quantise x [.., head_dim] to i8; return the quants and one scale per head, [..].

    A scale is the largest magnitude in the head divided by 127.
    """
    scales = np.abs(x).max(axis=-1) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(x / divisors).astype(np.int8), scales


def dequantised_heads(quants: npt.NDArray[np.int8], scales: F32) -> F32:
    x: F32 = quants.astype(np.float32) * scales[..., None]
    return x


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: RMS norm of each head of q and of k.

    `weight` [2 * head_dim]: the weights for every head of q, then for every head of k.
    """

    weight: str
    block: Attention


@dataclass(frozen=True, slots=True)
class NormValues(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: RMS norm of each head of v, no weights."""

    block: Attention


@dataclass(frozen=True, slots=True)
class NormWhole(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: one RMS norm of all of q, and one of all of k.

    `weight` [(heads + kv_heads) * head_dim]: q's weights, then k's.
    """

    weight: str
    block: Attention


@dataclass(frozen=True, slots=True)
class ScaleQueries(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: q times the factor of its token's position.

    q is in the first `features` columns.
    """

    scaling: QueryScaling
    features: int


@dataclass(frozen=True, slots=True)
class Attend(PagedOperation):
    """q, k and v [tokens, qkv features] f32 -> [tokens, heads * head_dim], in the matmuls' activation type.

    Rotates q and k, writes k and v to the layer's KV cache, and attends to the cached positions within the
    block's window. `sinks` names the weight of the sinks, [heads] f32. With `only_stores`, it does
    not attend, and the result is any value [tokens, features] that depends on the input.
    """

    block: Attention
    sinks: str | None = None
    only_stores: bool = False

    @property
    def rotation(self) -> Rotation:
        return self.block.rotation


@dataclass(frozen=True, slots=True)
class DropGates(Operation):
    """[tokens, q features + qkv features] f32 -> [tokens, qkv features]: q, k and v without the gates.

    In `x`, the order is q, gates, k, v.
    """

    block: Attention


@dataclass(frozen=True, slots=True)
class Gate(Operation):
    """[tokens, heads * head_dim] -> the same shape and type: `x` times the sigmoid of the gates.

    `gates` names the value with q, gates, k and v that DropGates reads.
    """

    READS: ClassVar = ("x", "gates")
    gates: str
