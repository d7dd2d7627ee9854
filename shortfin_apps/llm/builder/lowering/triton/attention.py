"""Attention in Triton: the qkv projection with rotation and cache write, then attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.lowering.cpu.attention import sinks
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.attention_kernels import AttentionKernels
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import MatmulKernels
from shortfin_apps.llm.builder.lowering.triton.operands import Activations, MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import tiles_of
from shortfin_apps.llm.model.attention import Attend, Attention


class TritonAttention:
    """Kernels of the qkv projection, the cache write and attention.

    Pages have the same layout as for the linalg kernels.
    """

    def __init__(self, context: LoweringContext, launcher: Launcher, operands: MatmulOperands) -> None:
        spec, options, tiles = context.spec, context.options, tiles_of(context.target)
        self._spec, self._options, self._tiles = spec, options, tiles
        self._matmuls = MatmulKernels(spec, options, tiles.matmul)
        self._weights = context.weights
        self._launcher = launcher
        self._operands = operands

    def project(
        self,
        e: Emitter,
        given: Activations,
        weight: str,
        bias: str | None,
        head_norm: str | None,
        operation: Attend,
        batch: Batch,
    ) -> Tensor:
        """Emit the qkv projection; return the rotated q [tokens, heads * head_dim] in `query_dtype`.

        The kernel writes the rotated k, and v, to the batch's cache. `weight`, `bias` and `head_norm` are
        names of weights.
        """
        shape = self._weights.shape(weight)
        make = partial(self._matmuls.project_qkv, operation.block, shape, batch.tokens, batch.slab)
        absent = {
            name for name, given_name in (("bias", bias), ("head_norm", head_norm)) if given_name is None
        }
        kernel, operands = self._operands.of(e, given, weight, make, absent)
        operands |= {
            "layer": batch.place_of(operation.layer),
            "bias": None if bias is None else self._weights.load_one(e, bias),
            "head_norm": None if head_norm is None else self._weights.load_one(e, head_norm),
            "rotary": batch.rotary,
            "slots": batch.slots,
            "cache": batch.cache,
        }
        made = self._launcher.launch(e, kernel, operands)
        batch.cache = made["cache"]
        return made["q"]

    def store(self, e: Emitter, qkv: Tensor, norm: str, operation: Attend, batch: Batch) -> Tensor:
        """Norm and rotate q and k, and write k and v to the cache; return q as `project` does.

        `qkv` [tokens, features] f32 may have gates between q and k. `norm` names the weight of the norms.
        """
        _, features = qkv.shape
        assert isinstance(features, int)
        operands = {
            "tokens": batch.tokens,
            "layer": batch.place_of(operation.layer),
            "qkv": qkv,
            "norm": self._weights.load_one(e, norm),
            "rotary": batch.rotary,
            "slots": batch.slots,
            "cache": batch.cache,
        }
        made = self._launcher.launch(
            e, self._kernels(operation.block, batch).store_qkv(batch.slab, features), operands
        )
        batch.cache = made["cache"]
        return made["q"]

    def attend(self, e: Emitter, q: Tensor, operation: Attend, batch: Batch) -> Tensor:
        """Attend with the q of `project`; return [tokens, heads * head_dim] in the matmuls' activation type.

        Sequences with one new token (all in a decode, some in an extend) are handled by `attend_singles`.
        """
        kernels, given = self._kernels(operation.block, batch), sinks(e, self._weights, operation)
        return launch_attention(e, self._launcher, kernels, q, operation.layer, given, batch)

    def _kernels(self, block: Attention, batch: Batch) -> AttentionKernels:
        return AttentionKernels(self._spec, block, self._options, self._tiles.for_rows(batch.rows))


def launch_attention(
    e: Emitter,
    launcher: Launcher,
    kernels: AttentionKernels,
    q: Tensor,
    layer: int,
    sinks: Mapping[str, Tensor | None],
    batch: Batch,
) -> Tensor:
    """Attend with q to the layer's cached positions; return what `kernels` write.

    Sequences with one new token (all in a decode, some in an extend) are handled by `attend_singles`.
    """
    operands: dict[str, Dim | Tensor | None] = {
        "tokens": batch.tokens,
        "rows": batch.rows,
        "width": batch.width,
        "layer": batch.place_of(layer),
        "q": q,
        "cache": batch.cache,
        "starts": batch.starts,
        "seq_lens": batch.seq_lens,
        "blocks": batch.blocks,
        **sinks,
    }
    if batch.is_decode:
        return _attend_singles(e, launcher, kernels, operands | {"offsets": None}, batch)
    operands["offsets"] = batch.offsets
    is_packed = batch.chunk is None
    kernel = kernels.attend(is_packed, batch.slab)
    operands["out"] = out = launcher.launch(e, kernel, operands)["out"]
    return _attend_singles(e, launcher, kernels, operands, batch) if is_packed else out


def _attend_singles(
    e: Emitter,
    launcher: Launcher,
    kernels: AttentionKernels,
    operands: Mapping[str, Dim | Tensor | None],
    batch: Batch,
) -> Tensor:
    slots = e.times(batch.width, kernels.stride)
    splits = e.at_most(e.ceil_divide(slots, kernels.split), kernels.splits)
    made = launcher.launch(
        e,
        kernels.attend_singles(batch.slab),
        {**operands, "splits": splits, "counters": batch.counters},
    )
    batch.counters = made["counters"]
    return made["out"]
