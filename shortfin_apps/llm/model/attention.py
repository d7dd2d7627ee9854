"""The attention block: heads, their rotation, and what a token may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.operations import (
    AddBias,
    AddNormed,
    Gate,
    Linear,
    ModelTensor,
    Operation,
    norm_before,
)
from shortfin_apps.llm.model.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of `heads` query heads over the keys and values of `kv_heads`, plus its input.

    Rows of q and k are in the half-split rotary order: element i of a head rotates with element i +
    head_dim / 2. If only part of the head rotates, it is the first part of both halves.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None  # None: q and k do not rotate
    window: int | None = None  # number of last tokens that a token sees, including itself; None: all
    sinks: bool = False  # each head's softmax has an extra learned score with value 0
    cap: float | None = None  # scores are cap * tanh(score / cap)
    score_scale: float = 1.0  # multiplies scores, in addition to 1 / sqrt(head_dim)
    qk_norm: bool = False  # RMS norm of each head of q and k before rotation
    whole_qk_norm: bool = False  # RMS norm over all heads of q, and of k
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    gate: bool = False  # the result is multiplied by the sigmoid of gates projected with q
    norm_before: bool = True
    norm_after: bool = False  # norm of the result before adding it
    fused_qkv: bool = False  # q, k and v are one tensor of the source

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
    def kv_layout(self) -> KeysValues:
        return KeysValues(self.kv_heads, self.head_dim, self.window)

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.head_dim, self.rope, self.score_scale)

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; q, k and v are stacked."""
        if self.norm_before:
            yield ModelTensor("attn_norm.weight", (hidden,))
        sizes = {"attn_q": (1 + self.gate) * self.q_features, "attn_k": self.kv_features}
        sizes["attn_v"] = self.kv_features
        if self.fused_qkv:
            yield ModelTensor("attn_qkv.weight", (self.qkv_features, hidden))
        else:
            for name, features in sizes.items():
                yield ModelTensor(f"{name}.weight", (features, hidden), "attn_qkv.weight")
        if self.bias:
            for name, features in sizes.items():
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
        """List the operations from the residual stream `x` to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}attn_norm.weight" if self.norm_before else None)
        yield Linear("normed", "gated_qkv" if self.gate else "qkv", f"{prefix}attn_qkv.weight")
        if self.gate:
            yield DropGates("gated_qkv", "qkv", self)
        if self.bias:
            yield AddBias("qkv", "qkv", f"{prefix}attn_qkv.bias")
        if self.qk_norm:
            yield NormHeads("qkv", "qkv", f"{prefix}attn_qk_norm.weight", self)
        if self.whole_qk_norm:
            yield NormWhole("qkv", "qkv", f"{prefix}attn_qk_norm.weight", self)
        yield Attend("qkv", "attended", layer, self, f"{prefix}attn_sinks.weight" if self.sinks else None)
        if self.gate:
            yield Gate("attended", "attended", "gated_qkv")
        projected, residual = ("projected", None) if self.norm_after else (out, x)
        yield Linear("attended", projected, f"{prefix}attn_output.weight", residual)
        if self.output_bias:
            yield AddBias(projected, projected, f"{prefix}attn_output.bias")
        if self.norm_after:
            yield AddNormed(projected, out, f"{prefix}post_attention_norm.weight", x)


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """q, k and v [tokens, qkv features] f32 -> the same shape: RMS norm of each head of q and of k.

    `weight` [2 * head_dim] holds the weights of q's heads, then of k's.
    """

    weight: str
    block: Attention


@dataclass(frozen=True, slots=True)
class NormWhole(Operation):
    """NormHeads, but over all heads of q together, and over all heads of k.

    `weight` [(heads + kv_heads) * head_dim] holds q's weights, then k's.
    """

    weight: str
    block: Attention


@dataclass(frozen=True, slots=True)
class Attend(Operation):
    """q, k and v [tokens, qkv features] f32 -> [tokens, heads * head_dim], in the matmuls' activation type.

    Rotates q and k as the `block` says, writes k and v to the layer's part of the KV cache, and attends over
    it, within the block's window. `sinks` names its sinks [heads] f32.
    """

    layer: int
    block: Attention
    sinks: str | None = None


@dataclass(frozen=True, slots=True)
class DropGates(Operation):
    """[tokens, q features + qkv features] f32 -> [tokens, qkv features]: q, k and v without the gates.

    The gates of attention's result are between q and k.
    """

    block: Attention
