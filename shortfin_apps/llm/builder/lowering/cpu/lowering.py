"""The graph's operations as hand-written vector kernels, for CPUs."""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.kernels.cpu.top_k import TopKGeometry
from shortfin_apps.llm.builder.lowering.amx.fused_layer import FusedLayers
from shortfin_apps.llm.builder.lowering.cpu.attention import AmxAttention, choose_attention
from shortfin_apps.llm.builder.lowering.cpu.embedding import embedding
from shortfin_apps.llm.builder.lowering.cpu.matmul import choose_operations
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.errors import BuildError


class CpuLowering:
    """Implements Lowering over weights in panels (see weight_layout.py).

    Raises BuildError for a model whose sizes do not fill vectors.
    """

    def __init__(self, spec: LlamaSpec, options: BuildOptions, target: Target, weights: WeightTypes) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(spec, name) % LANES:
                raise BuildError(
                    f"{name} {getattr(spec, name)} is not a multiple of {LANES}, as CPU kernels need"
                )
        self._spec = spec
        self._options = options
        self._target = target
        self._weights = weights
        self._kernels: dict[str, str] = {}
        self._attention = choose_attention(spec, options, target, self.kernel)
        self._operations = choose_operations(spec, options, target, weights, self.kernel)

    def declarations(self) -> list[str]:
        return list(self._kernels.values())

    def embedding(self, e: Emitter, tokens: Tensor) -> Tensor:
        return embedding(e, self._spec, self._weights, tokens)

    def project(self, e: Emitter, x: Tensor) -> Tensor:
        return self._operations.project(e, x)

    def layer(
        self, e: Emitter, x: Tensor, qkv: Tensor, number: int, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        operations, attention = self._operations, self._attention
        if batch.chunk == 1 and isinstance(operations, FusedLayers) and isinstance(attention, AmxAttention):
            return operations.decode(e, x, qkv, number, batch, attention.parameters(batch))
        return operations.advance(e, x, attention.attend(e, qkv, number, batch), number)

    def logits(self, e: Emitter, x: Tensor) -> Tensor:
        return self._operations.logits(e, x)

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        assert isinstance(vocab, int)
        k = self._options.top_k
        kernel = self.kernel("cpu/top_k", f"top_k_{k}_of_{vocab}", g=TopKGeometry(vocab, k))
        values, indices = e.dispatch(
            kernel, [rows], [rows], [logits], [((rows, k), "f32"), ((rows, k), "i64")]
        )
        return values, indices

    def kernel(self, template: str, name: str, **parameters: Any) -> str:
        """Renders a template under a name of its own; the same name means the same kernel."""
        if name not in self._kernels:
            self._kernels[name] = render(template, name, **parameters)
        return name
