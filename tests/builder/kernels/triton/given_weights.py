"""Weights that are arguments of a program, as it is launched by a test."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


class GivenWeights(WeightTypes):
    """Weights that are arguments of the function."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._tensors[name].shape)

    def load(self, e: Emitter, name: str) -> list[Tensor]:
        return [self._tensors[name]]
