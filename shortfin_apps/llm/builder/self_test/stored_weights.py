"""An artefact's weights as f32: rounded or quantised as in its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.quantise import quantise_fp8, quantise_rows
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import (
    FP8_DTYPES,
    Fp8Rows,
    Int8Panels,
    RowMajor,
    Taps,
    WeightLayout,
    cast_floats,
)
from shortfin_apps.llm.builder.weights.write import Weight, plan_weights
from shortfin_apps.llm.model.spec import BuildOptions, weight_shapes
from shortfin_apps.llm.model.weight_blocks import Blocks

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

HEAD_ROWS = 8192  # rows of the embedding or head converted to f32 at a time


class StoredWeights:
    """The weights of a source, as f32 with the values that the target's parameters represent.

    A weight is read from the source whenever a method needs it.
    """

    def __init__(self, source: ModelSource, options: BuildOptions, target: Target) -> None:
        self._source = source
        self._options = options
        self._target = target
        self._plan = {weight.name: weight for weight in plan_weights(source.spec)}

    @property
    def names(self) -> list[str]:
        return list(weight_shapes(self._source.spec))

    def whole(self, name: str) -> F32:
        """Return a weight in its logical shape; weights of experts are [experts, out, in]."""
        weight = self._plan[name]
        matrices = [_worth(self._load(each), self._layout(name), self._options) for each in weight.matrices()]
        return matrices[0] if weight.experts is None else np.stack(matrices)

    def block(self, layer: int, without: str | None = None) -> dict[str, F32]:
        """Return the layer's weights, by their names without `blk.N.`; not the one named `without`."""
        prefix = f"blk.{layer}."
        names = [name for name in self._plan if name.startswith(prefix) and name != without]
        return {name.removeprefix(prefix): self.whole(name) for name in names}

    def rows(self, name: str, indices: npt.NDArray[np.intp]) -> F32:
        """Return the rows `indices` of a matrix."""
        return _worth(_taken(self._load(self._plan[name]), indices), self._layout(name), self._options)

    def slices(self, name: str) -> Iterator[F32]:
        """Yield all rows of a matrix, HEAD_ROWS at a time."""
        value, layout = self._load(self._plan[name]), self._layout(name)
        count = len(value.quants if isinstance(value, Blocks) else value)
        for begin in range(0, count, HEAD_ROWS):
            indices = np.arange(begin, min(begin + HEAD_ROWS, count))
            yield _worth(_taken(value, indices), layout, self._options)

    def _layout(self, name: str) -> WeightLayout:
        return weight_layout(name, self._source.spec, self._options, self._target)

    def _load(self, weight: Weight) -> Array | Blocks:
        kind = self._layout(weight.name).blocks
        return weight.load(self._source) if kind is None else weight.load_blocks(self._source, kind)


def _taken(value: Array | Blocks, rows: npt.NDArray[np.intp]) -> Array | Blocks:
    return value.take_rows(rows) if isinstance(value, Blocks) else value[rows]


def _worth(value: Array | Blocks, layout: WeightLayout, options: BuildOptions) -> F32:
    """Return `value` as f32, after the rounding or quantisation of `layout`.

    Every layout rounds rows independently, so `value` may be only some rows of a matrix.
    """
    if isinstance(value, Blocks):
        return value.dequantise()
    quants: Array
    match layout:
        case Int8Panels():
            quants, scales = quantise_rows(value)
        case Fp8Rows(dtype=dtype):
            quants, scales = quantise_fp8(value, FP8_DTYPES[dtype])
        case RowMajor(dtype=dtype):
            return cast_floats(value, dtype).astype(np.float32)
        case Taps():
            return cast_floats(value, "f32").astype(np.float32)
        case _:
            return cast_floats(value, options.activations).astype(np.float32)
    worth: F32 = quants.astype(np.float32) * scales[:, None]
    return worth
