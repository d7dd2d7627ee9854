"""From a source's tensors to the parameters that the compiled model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shortfin_apps.llm.build.sources.base import Array, ModelSource, tensor_shapes
from shortfin_apps.llm.build.spec import LlamaSpec, WeightType
from shortfin_apps.llm.build.weights_archive import ArchiveEntry, write_archive

WEIGHT_DTYPES: dict[WeightType, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}

# A fused matrix, by the tensors stacked on its rows.
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: `parts` are the source's tensors, stacked on rows in that order."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def load(self, source: ModelSource) -> Array:
        """The parameter's value. Values beyond the dtype's range become its largest."""
        value = np.empty(self.shape, self.dtype)
        row = 0
        for part in self.parts:
            tensor = source.tensor(part)
            value[row : row + len(tensor)] = _cast(tensor, self.dtype)
            row += len(tensor)
        return value


def plan_parameters(spec: LlamaSpec, weights: WeightType) -> list[Parameter]:
    """The parameters of a model, in the order in which an invocation reads them."""
    shapes = tensor_shapes(spec)
    first_parts = {parts[0]: (fused, parts) for fused, parts in FUSED.items()}
    later_parts = {part for parts in FUSED.values() for part in parts[1:]}
    parameters = []
    for name, shape in shapes.items():
        prefix, kind = _split(name)
        if kind in later_parts:
            continue
        fused, parts = first_parts.get(kind, (kind, (kind,)))
        names = tuple(f"{prefix}{part}.weight" for part in parts)
        rows = sum(shapes[part][0] for part in names)
        dtype = np.dtype(np.float32) if kind.endswith("norm") else WEIGHT_DTYPES[weights]
        parameters.append(Parameter(f"{prefix}{fused}.weight", (rows, *shape[1:]), dtype, names))
    return parameters


def write_weights(
    source: ModelSource, weights: WeightType, path: Path, on_progress: Callable[[int], None]
) -> None:
    """Writes an IREE parameter archive, holding one parameter in memory at a time.

    `on_progress` is told the bytes written since it was last told.
    """
    parameters = plan_parameters(source.spec, weights)
    entries = [ArchiveEntry(parameter.name, parameter.num_bytes) for parameter in parameters]

    def contents() -> Iterator[bytes | memoryview]:
        for parameter in parameters:
            yield parameter.load(source).view(np.uint8).reshape(-1).data
            on_progress(parameter.num_bytes)

    write_archive(path, entries, contents())


def _split(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` to (`blk.3.`, `attn_q`)."""
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    return (f"{prefix}." if prefix else ""), kind


def _cast(tensor: Array, dtype: np.dtype[Any]) -> Array:
    if dtype != np.float16:
        return tensor.astype(dtype, copy=False)
    largest = np.finfo(np.float16).max  # bf16 and f32 reach further than f16
    return np.clip(tensor.astype(np.float32, copy=False), -largest, largest).astype(dtype)
