"""Latent attention on CPUs, with the kernels of other attention: one K/V head with keys as wide as a row.

These kernels read K and V in different orders, so a page has both. V is the whole key; only the latent's
elements of the result are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import emit_unrotated
from shortfin_apps.llm.builder.lowering.avx512.attention import Bf16Attention
from shortfin_apps.llm.builder.lowering.cpu.attention import VectorAttention
from shortfin_apps.llm.builder.lowering.linalg.latent_attention import queries_and_keys
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext, Values
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.latent_attention import AttendLatent, LatentAttention

_GROUP_BYTES = 24 << 10  # maximum bytes of the f32 results of a group of heads


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
        groups = head_groups(block)
        part = Attention(heads=block.heads // groups, kv_heads=1, head_dim=block.key_dim, rope=None)
        if part.rotation not in batch.rotaries:
            batch.rotaries[part.rotation] = emit_unrotated(e, part.rotation, batch.tokens)
        batch.rotation = part.rotation  # q and the key are rotated already
        attend = Attend("qkv", "attended", operation.layer, part, only_stores=operation.only_stores)
        qs = (e.part(q, 1, first, part.heads) for first in range(0, block.heads, part.heads))
        qkvs = [_joined(e, block, each, key) for each in qs]
        if operation.only_stores:
            return self._attention.attend(e, attend, qkvs[0], batch)
        outs = [self._attention.attend(e, attend, qkv, batch) for qkv in qkvs]
        return _latents(e, block, outs, batch)


def head_groups(block: LatentAttention) -> int:
    """Return the number of groups of heads, each with a launch, whose results fit a worker's stack.

    Each launch writes the same key and value to the pages.
    """
    most = max(1, _GROUP_BYTES // (4 * block.key_dim))
    return next(
        groups for groups in range(-(-block.heads // most), block.heads + 1) if block.heads % groups == 0
    )


def _joined(e: Emitter, block: LatentAttention, q: Tensor, key: Tensor) -> Tensor:
    """Return q, scaled, the key, and the key as value: [tokens, (heads + 2) * key_dim] f32.

    Attention divides scores by the square root of a key's size.
    """
    body = f"""\
  %scale = arith.constant {block.scale * math.sqrt(block.key_dim):.9e} : f32
  %y = arith.mulf %a, %scale : f32
  linalg.yield %y : f32"""
    scaled = e.elementwise("thd", ("thd", q.shape, "f32"), [(q, "thd")], body)
    joined = e.concat([scaled, key, key], 1)
    tokens, heads, _ = joined.shape
    assert isinstance(heads, int)
    return e.reshape(joined, (tokens, heads * block.key_dim))


def _latents(e: Emitter, block: LatentAttention, outs: Sequence[Tensor], batch: Batch) -> Tensor:
    """Return the latents of all heads [tokens, heads * rank], of groups [tokens, their heads * key_dim]."""
    shape = (batch.tokens, block.heads // len(outs), block.key_dim)
    joined = e.concat([e.part(e.reshape(out, shape), 2, 0, block.rank) for out in outs], 1)
    return e.reshape(joined, (batch.tokens, block.heads * block.rank))
