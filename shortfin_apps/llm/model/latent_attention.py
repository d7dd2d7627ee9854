"""Multi-head latent attention (MLA, arXiv:2405.04434): all heads read one compressed vector per token.

The source has two matrices that expand a token's latent [rank] to the keys and values of a head. Programs
never expand the cache. They multiply q by the first matrix, attend to the latents as if these were the keys
and values of a single K/V head, and multiply the result by the second matrix (the "absorbed" form). Every
entry computes this form, so entries agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.model.attention import dequantised_heads, quantised_heads
from shortfin_apps.llm.model.block import Block, CachedTokens, ReferenceLayer
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.operations import Linear, ModelTensor, Norm, Operation, PagedOperation
from shortfin_apps.llm.model.reference.pointwise import F32, rms_norm
from shortfin_apps.llm.model.reference.rotary import rotary, rotate
from shortfin_apps.llm.model.rope import Rope, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Block):
    """Latent attention with a residual connection.

    A head of q has `plain` elements that do not rotate, then `rotated` ones. The key of a token is its latent
    [rank] after an RMS norm, then `rotated` elements that all heads share. Its value is the latent. A head's
    result has `value_dim` elements. Rotated elements are in the half-split order, as in Attention.
    """

    KIND: ClassVar[str] = "latent attention"
    heads: int
    rank: int
    plain: int
    rotated: int
    value_dim: int
    rope: Rope
    query_rank: int | None = None  # q is projected from a normed vector of this size; None: from the input
    score_scale: float = 1.0  # multiplies scores, in addition to 1 / sqrt(plain + rotated)
    in_pairs: bool = False  # in the source, elements that rotate together are adjacent

    @property
    def head_dim(self) -> int:
        return self.plain + self.rotated

    @property
    def key_dim(self) -> int:
        return self.rank + self.rotated

    @property
    def expanded_dim(self) -> int:
        """Rows of attn_kv_b.weight for each head: of its keys, then of its values."""
        return self.plain + self.value_dim

    @property
    def joint_features(self) -> int:
        """Features of all projections of the input: q or its compressed form, then the key."""
        return (self.query_rank or self.heads * self.head_dim) + self.key_dim

    @property
    def scale(self) -> float:
        """The factor of all scores."""
        return self.score_scale / math.sqrt(self.head_dim)

    @property
    def kv_layout(self) -> KeysValues:
        return KeysValues(1, self.key_dim, values_in_keys=True)

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.rotated, self.rope)

    @property
    def attended_features(self) -> int:
        return self.heads * self.key_dim

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; the projections of the input are stacked."""
        yield ModelTensor("attn_norm.weight", (hidden,))
        joint, queries = "attn_q_kv_a.weight", self.heads * self.head_dim
        if self.query_rank is None:
            yield ModelTensor("attn_q.weight", (queries, hidden), joint)
        else:
            yield ModelTensor("attn_q_a.weight", (self.query_rank, hidden), joint)
        yield ModelTensor("attn_kv_a_mqa.weight", (self.key_dim, hidden), joint)
        if self.query_rank is not None:
            yield ModelTensor("attn_q_a_norm.weight", (self.query_rank,))
            yield ModelTensor("attn_q_b.weight", (queries, self.query_rank))
        # Two kernels each read a part of every head's rows, in floats.
        yield ModelTensor("attn_kv_b.weight", (self.heads * self.expanded_dim, self.rank), stored="rows")
        yield ModelTensor("attn_kv_a_norm.weight", (self.rank,))
        yield ModelTensor("attn_output.weight", (hidden, self.heads * self.value_dim))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield Norm(x, "normed", f"{prefix}attn_norm.weight")
        yield Linear("normed", "joint", f"{prefix}attn_q_kv_a.weight")
        queries = "joint"
        if self.query_rank is not None:
            yield NormFirst("joint", "low_queries", f"{prefix}attn_q_a_norm.weight", self.query_rank)
            yield Linear("low_queries", "queries", f"{prefix}attn_q_b.weight")
            queries = "queries"
        expansion = f"{prefix}attn_kv_b.weight"
        yield AbsorbKeys(queries, "absorbed", expansion, self)
        norm = f"{prefix}attn_kv_a_norm.weight"
        yield AttendLatent(queries, "attended", layer, "absorbed", "joint", norm, self)
        yield ExpandValues("attended", "expanded", expansion, self)
        yield Linear("expanded", out, f"{prefix}attn_output.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        """Expand keys and values of all positions, which programs do not."""
        past = np.zeros((2, 0, 1, self.key_dim), np.float32) if layer.past is None else layer.past
        q, keys = self._projected(x, layer, past.shape[1])
        if layer.has_quantised_cache:
            keys = dequantised_heads(*quantised_heads(keys))
        layer.cached = CachedTokens(keys, keys)
        seen = np.concatenate([past[0], keys])[:, 0]
        expansion = layer.weights["attn_kv_b.weight"].reshape(self.heads, self.expanded_dim, self.rank)
        expanded = np.einsum("kc,hdc->khd", seen[:, : self.rank], expansion)
        k, v = np.split(expanded, [self.plain], axis=2)
        scores = np.einsum("qhd,khd->hqk", q[:, :, : self.plain], k)
        scores += np.einsum("qhd,kd->hqk", q[:, :, self.plain :], seen[:, self.rank :])
        visible = np.tri(len(x), len(seen), len(seen) - len(x), dtype=bool)
        scores = np.where(visible, scores * np.float32(self.scale), -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", p, v).reshape(len(x), -1)
        added: F32 = attended @ layer.weights["attn_output.weight"].T
        return added

    def _projected(self, x: F32, layer: ReferenceLayer, start: int) -> tuple[F32, F32]:
        """Return q [tokens, heads, head_dim] and the keys [tokens, 1, key_dim], both rotated."""
        weights, eps = layer.weights, layer.rms_norm_eps
        joint = layer.normed(x, "attn_norm.weight") @ weights["attn_q_kv_a.weight"].T
        q, latent, turning = np.split(joint, [-self.key_dim, -self.rotated], axis=1)
        if self.query_rank is not None:
            q = rms_norm(eps, q, weights["attn_q_a_norm.weight"]) @ weights["attn_q_b.weight"].T
        q = q.reshape(len(x), self.heads, self.head_dim)
        turns = rotary(self.rotation, start, len(x), layer.max_position_embeddings)
        q = np.concatenate([q[:, :, : self.plain], rotate(q[:, :, self.plain :], *turns)], axis=2)
        latent = rms_norm(eps, latent, weights["attn_kv_a_norm.weight"])
        return q, np.concatenate([latent[:, None], rotate(turning[:, None], *turns)], axis=2)


@dataclass(frozen=True, slots=True)
class NormFirst(Operation):
    """RMS norm of the first `features` columns of x [tokens, any] f32 -> [tokens, features].

    The result is in the matmuls' activation type.
    """

    weight: str
    features: int


@dataclass(frozen=True, slots=True)
class AbsorbKeys(Operation):
    """q [tokens, any] f32 -> [tokens, heads * rank] f32: each head's `plain` elements times its key matrix.

    The first heads * head_dim columns of `x` are q. `weight` [heads * expanded_dim, rank]: for each head, the
    rows of its key matrix [plain, rank] come first.
    """

    weight: str
    block: LatentAttention


@dataclass(frozen=True, slots=True)
class AttendLatent(PagedOperation):
    """q [tokens, any] f32 -> [tokens, heads * rank], in the matmuls' activation type.

    Rotates the last `rotated` elements of each head of q, and of the key. Writes the key to the layer's KV
    cache, and attends to the cached positions. `absorbed`: AbsorbKeys' result; the last key_dim columns of
    `joint` [tokens, joint_features] f32: the latent before its norm, and the key's other elements; `norm`:
    the name of the norm's weight [rank]. `only_stores`: as for Attend.
    """

    READS: ClassVar = ("x", "absorbed", "joint")
    absorbed: str
    joint: str
    norm: str
    block: LatentAttention
    only_stores: bool = False

    @property
    def rotation(self) -> Rotation:
        return self.block.rotation


@dataclass(frozen=True, slots=True)
class ExpandValues(Operation):
    """[tokens, heads * rank] -> [tokens, heads * value_dim], both in the matmuls' activation type.

    Each head times the transpose of its value matrix [value_dim, rank], the last rows of the head's part of
    `weight` [heads * expanded_dim, rank].
    """

    weight: str
    block: LatentAttention
