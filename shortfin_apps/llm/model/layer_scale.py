"""`LayerScale`: the multiplication of the residual stream by a learned scalar at the end of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.operations import ModelTensor, Operation
from shortfin_apps.llm.model.reference.pointwise import F32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale(Block):
    """Multiplies the residual stream by one learned scalar."""

    KIND: ClassVar[str] = "layer scales"

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors: the scalar, [1]."""
        yield ModelTensor("layer_output_scale.weight", (1,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operation that reads the residual stream `x` and writes the new one to `out`."""
        yield Scale(x, out, f"blk.{layer}.layer_output_scale.weight")

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        return x * (layer.weights["layer_output_scale.weight"] - 1)


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """[tokens, hidden] f32 -> the same shape: `x` times the scalar `weight` [1]."""

    weight: str
