"""Write a source's tensors as the parameters that the compiled model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from shortfin_apps.llm.builder.quantise import quantise
from shortfin_apps.llm.builder.sources.base import Array, ModelSource
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import WeightLayout
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.contract.irpa import ArchiveEntry, write_archive
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, weight_parts, weight_shapes
from shortfin_apps.llm.model.weight_blocks import Blocks, BlockType, stack

_ITEM_BYTES = {"i8": 1, "f8E4M3FN": 1, "f8E4M3FNUZ": 1, "bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the model: the source's tensors `parts`, concatenated along their rows in this order.

    `scale`: a factor of the stored values. `experts`: the number of experts, which have equally many parts
    each; None for other weights.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    scale: float = 1.0
    experts: int | None = None

    def matrices(self) -> list[Weight]:
        """Return the weight of each expert, or the weight itself if it has no experts."""
        if self.experts is None:
            return [self]
        shape, count = self.shape[1:], len(self.parts) // self.experts
        parts = (self.parts[i : i + count] for i in range(0, len(self.parts), count))
        return [Weight(self.name, shape, each) for each in parts]

    def load(self, source: ModelSource) -> Array:
        """Return the value in the widest dtype of the parts.

        Callers must not call this for a weight of experts; see `matrices`.
        """
        tensors = [source.tensor(part) for part in self.parts]
        value = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        return value if self.scale == 1 else value.astype(np.float32) * np.float32(self.scale)

    def load_blocks(self, source: ModelSource, kind: BlockType) -> Blocks:
        """Return the weight as blocks of type `kind`.

        Of the tensors stacked into the weight, quantised ones are converted if `kind` can hold their blocks;
        the others are quantised here.
        """
        return stack([_blocks(source, part, kind) for part in self.parts])

    def stored(self, source: ModelSource, layout: WeightLayout) -> Iterator[Array]:
        """Yield the values of the weight's parameters, in the order of the file.

        Holds one matrix in memory at a time, besides the scales of all matrices of experts.
        """
        scales: list[list[Array]] = []
        for matrix in self.matrices():
            first, *others = matrix._store(source, layout)
            yield first
            scales.append(others)
        for each in zip(*scales, strict=True):
            yield from each

    def _store(self, source: ModelSource, layout: WeightLayout) -> list[Array]:
        kind = layout.blocks
        return layout.store(self.load(source) if kind is None else self.load_blocks(source, kind))


def _blocks(source: ModelSource, part: str, kind: BlockType) -> Blocks:
    own = source.blocks(part)
    kept = None if own is None else own.converted(kind)
    made = kept or quantise(source.tensor(part), kind.bits).converted(kind)
    assert made is not None, f"{part}: {kind} has no room for what is quantised"
    return made


def plan_weights(spec: ModelSpec) -> list[Weight]:
    """List the weights of a model, in the order in which an invocation reads them."""
    shapes = weight_shapes(spec)
    return [
        Weight(
            name,
            shapes[name],
            tuple(part.name for part in parts),
            parts[0].scale,
            shapes[name][0] if parts[0].expert is not None else None,
        )
        for name, parts in weight_parts(spec.tensors()).items()
    ]


def stored_bytes(spec: ModelSpec, options: BuildOptions, target: Target) -> int:
    """Return the size of all parameters together."""
    return sum(entry.num_bytes for entry in _entries(spec, options, target))


def write_weights(
    source: ModelSource, options: BuildOptions, target: Target, path: Path, on_progress: Callable[[int], None]
) -> None:
    """Write an IREE parameter archive, with one matrix in memory at a time.

    `on_progress` is called with the bytes written since its last call.
    """

    def contents() -> Iterator[bytes | memoryview]:
        for weight in plan_weights(source.spec):
            layout = weight_layout(weight.name, source.spec, options, target)
            for value in weight.stored(source, layout):
                yield np.ascontiguousarray(value).view(np.uint8).reshape(-1).data
                on_progress(value.nbytes)

    write_archive(path, _entries(source.spec, options, target), contents())


def _entries(spec: ModelSpec, options: BuildOptions, target: Target) -> list[ArchiveEntry]:
    types = parameter_types(spec, options, target)
    return [ArchiveEntry(name, prod(shape) * _ITEM_BYTES[dtype]) for name, (shape, dtype) in types.items()]
