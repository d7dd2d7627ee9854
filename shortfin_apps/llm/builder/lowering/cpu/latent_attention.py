"""Latent attention on CPUs, with the kernels of other attention: one K/V head with keys as wide as a row.

These kernels read K and V in different orders, so a page has both. V is the whole key, of whose result the
latent is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.graph.rotary import emit_unrotated
from shortfin_apps.llm.builder.lowering.avx512.attention import Bf16Attention
from shortfin_apps.llm.builder.lowering.cpu.attention import VectorAttention
from shortfin_apps.llm.builder.lowering.linalg.latent_attention import first_elements, queries_and_keys
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext, Values
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.latent_attention import AttendLatent, LatentAttention


class CpuLatentAttention(Kernels):
    """The kernel of AttendLatent, by the kernels of Attend that `make` creates."""

    def __init__(
        self, context: LoweringContext, make: Callable[[LoweringContext], VectorAttention | Bf16Attention]
    ) -> None:
        super().__init__(context)
        self._context = context
        self._attention = make(context)

    def compute(self, e: Emitter, operation: AttendLatent, values: Values) -> Tensor:
        block, batch = operation.block, values.batch
        q, key = queries_and_keys(self._context, e, operation, values)
        whole = _of_one_head(block)
        qkv = _joined(e, block, q, key)
        if whole.rotation not in batch.rotaries:
            batch.rotaries[whole.rotation] = emit_unrotated(e, whole.rotation, batch.tokens)
        batch.rotation = whole.rotation  # q and the key are rotated already
        out = self._attention.attend(e, Attend("qkv", "attended", operation.layer, whole), qkv, batch)
        return _latents(e, block, out, batch)


def _of_one_head(block: LatentAttention) -> Attention:
    return Attention(heads=block.heads, kv_heads=1, head_dim=block.key_dim, rope=None)


def _joined(e: Emitter, block: LatentAttention, q: Tensor, key: Tensor) -> Tensor:
    """Return q, scaled, the key, and the key as value: [tokens, (heads + 2) * key_dim] f32.

    Attention divides scores by the square root of a key's size.
    """
    body = f"""\
  %scale = arith.constant {block.scale * math.sqrt(block.key_dim):.9e} : f32
  %y = arith.mulf %a, %scale : f32
  linalg.yield %y : f32"""
    parts = [e.elementwise("thd", ("thd", q.shape, "f32"), [(q, "thd")], body), key, key]
    shape = (q.shape[0], block.heads + 2, block.key_dim)
    names, types = ", ".join(part.name for part in parts), ", ".join(part.type for part in parts)
    joined = e.tensor(
        f"tensor.concat dim(1) {names} : ({types}) -> {tensor_type(shape, 'f32')}", shape, "f32"
    )
    return e.reshape(joined, (q.shape[0], (block.heads + 2) * block.key_dim))


def _latents(e: Emitter, block: LatentAttention, out: Tensor, batch: Batch) -> Tensor:
    """Return the latents of heads: [tokens, heads * key_dim] -> [tokens, heads * rank]."""
    heads = e.reshape(out, (batch.tokens, block.heads, block.key_dim))
    return e.reshape(first_elements(e, heads, block.rank), (batch.tokens, block.heads * block.rank))
