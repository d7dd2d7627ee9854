"""Weights that are arguments of a program, as it is launched by a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.weights.layout import FP8_DTYPES, BlockRows, Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import FloatType
from shortfin_apps.llm.model.weight_blocks import BlockType


class GivenWeights(WeightTypes):
    """Weights that are arguments of the function: the parameters of each, by their names."""

    def __init__(self, tensors: Mapping[str, Tensor], blocks: Mapping[str, BlockType] | None = None) -> None:
        self._tensors = tensors
        self._blocks = blocks or {}

    def shape(self, name: str) -> tuple[int, ...]:
        if not isinstance(self.layout(name), BlockRows):
            return tuple(int(size) for size in self._tensors[name].shape)
        rows, elements = self._tensors[name].shape
        return int(rows), int(elements) * 8 // self._blocks[name].bits

    def layout(self, name: str) -> WeightLayout:
        if f"{name}.scales" not in self._tensors:
            return RowMajor(cast(FloatType, self._tensors[name].dtype))
        if fp8 := next((kind for kind in FP8_DTYPES if kind == self._tensors[name].dtype), None):
            return Fp8Rows(fp8)
        return BlockRows(self._blocks[name])

    def load(self, e: Emitter, name: str) -> list[Tensor]:
        stored = (name, f"{name}.scales", f"{name}.minima")
        return [self._tensors[parameter] for parameter in stored if parameter in self._tensors]
