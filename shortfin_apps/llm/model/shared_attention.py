"""Attention that reads the keys and values of another layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.model.attention import Attend, Attention, NormHeads, kept_qkv
from shortfin_apps.llm.model.block import ReferenceLayer
from shortfin_apps.llm.model.operations import AddNormed, Linear, ModelTensor, Norm, Operation
from shortfin_apps.llm.model.reference.pointwise import F32, rms_norm
from shortfin_apps.llm.model.reference.rotary import rotary, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAttention(Attention):
    """Attention with the keys and values of layer `source`, whose block has equal heads and keeps them.

    It has norms of q and k, before and after, and no bias. It stores nothing: attention writes k and v of new
    tokens once more to the pages of `source`, with the same bits.
    """

    KIND: ClassVar[str] = "attention with keys and values of another layer"
    source: int

    @property
    def kv_layout(self) -> None:
        return None

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; the norm of k is the one of `source`."""
        yield ModelTensor("attn_norm.weight", (hidden,))
        yield ModelTensor("attn_q.weight", (self.q_features, hidden))
        norms, head = "attn_qk_norm.weight", (self.head_dim,)
        yield ModelTensor("attn_q_norm.weight", head, norms)
        yield ModelTensor("attn_k_norm.weight", head, norms, layer=self.source)
        yield ModelTensor("attn_output.weight", (hidden, self.q_features))
        yield ModelTensor("post_attention_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield Norm(x, "normed", f"{prefix}attn_norm.weight")
        yield Linear("normed", "q", f"{prefix}attn_q.weight")
        yield JoinQueries("q", "qkv", kept_qkv(self.source), self)
        yield NormHeads("qkv", "qkv", f"{prefix}attn_qk_norm.weight", self)
        yield Attend("qkv", "attended", self.source, self)
        yield Linear("attended", "projected", f"{prefix}attn_output.weight")
        yield AddNormed("projected", out, f"{prefix}post_attention_norm.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        weights, (past, k, v) = layer.weights, layer.carried.keys_values[self.source]
        q = layer.normed(x, "attn_norm.weight") @ weights["attn_q.weight"].T
        norm = weights["attn_qk_norm.weight"][: self.head_dim]
        q = rms_norm(layer.rms_norm_eps, q.reshape(len(x), self.heads, self.head_dim), norm)
        q = rotate(q, *rotary(self.rotation, past.shape[1], len(x), layer.max_position_embeddings))
        attended = self._attended(q, k, v, past, None)
        added: F32 = attended @ weights["attn_output.weight"].T
        return layer.normed(added, "post_attention_norm.weight")


@dataclass(frozen=True, slots=True)
class JoinQueries(Operation):
    """q [tokens, q features] f32 -> [tokens, qkv features]: `x`, then k and v of the value `qkv`."""

    READS: ClassVar = ("x", "qkv")
    qkv: str
    block: Attention
