"""The part of a Lowering between two attentions, for forms that take one operation for each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.model.spec import LlamaSpec

Normed = TypeVar("Normed")


class SeparateOperations(ABC, Generic[Normed]):
    """Implements Lowering's `project` and `logits`, and `advance`, over what a subclass adds.

    `act` below is the activations' type, which matmuls read, as they do what `rms_norm` returns.
    """

    def __init__(self, spec: LlamaSpec) -> None:
        self._spec = spec

    @abstractmethod
    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Normed:
        """[tokens, hidden] f32 -> [tokens, hidden], as matmuls take it."""

    @abstractmethod
    def linear(self, e: Emitter, x: Tensor | Normed, weight: str, residual: Tensor | None = None) -> Tensor:
        """[tokens, in] act -> [tokens, out] f32, plus `residual`."""

    @abstractmethod
    def gated_linear(self, e: Emitter, x: Normed, weight: str) -> Tensor:
        """[tokens, in] act -> [tokens, out / 2] act: silu(gate) * up."""

    def project(self, e: Emitter, x: Tensor) -> Tensor:
        return self._project(e, x, 0)

    def advance(self, e: Emitter, x: Tensor, attended: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden] f32 and what the layer's attention returned -> as Lowering's `layer`."""
        x = self.linear(e, attended, f"blk.{layer}.attn_output.weight", residual=x)
        normed = self.rms_norm(e, x, f"blk.{layer}.ffn_norm.weight")
        h = self.gated_linear(e, normed, f"blk.{layer}.ffn_gate_up.weight")
        x = self.linear(e, h, f"blk.{layer}.ffn_down.weight", residual=x)
        is_last = layer + 1 == self._spec.num_hidden_layers
        return x, None if is_last else self._project(e, x, layer + 1)

    def logits(self, e: Emitter, x: Tensor) -> Tensor:
        return self.linear(e, self.rms_norm(e, x, "output_norm.weight"), self._spec.head_weight)

    def _project(self, e: Emitter, x: Tensor, layer: int) -> Tensor:
        h = self.rms_norm(e, x, f"blk.{layer}.attn_norm.weight")
        return self.linear(e, h, f"blk.{layer}.attn_qkv.weight")
