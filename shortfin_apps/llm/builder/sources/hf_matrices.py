"""Quantised matrices in a Hugging Face directory, each stored as several tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shortfin_apps.llm.builder.sources.base import Array, Quantisation
from shortfin_apps.llm.builder.sources.hf_quantised import MatrixFormat
from shortfin_apps.llm.builder.sources.safetensors_fp8 import FP8_TYPES, read_fp8
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.weight_blocks import BLOCK, Blocks, BlockType

Place = tuple[Path, str]  # a file, and the name of a tensor in it


class QuantisedMatrices:
    """The quantised matrices, removed from `tensors`; `files` are opened by safetensors."""

    def __init__(
        self,
        where: str,
        kind: MatrixFormat | None,
        tensors: dict[str, Place],
        files: Mapping[Path, Any],
    ) -> None:
        self._where = where
        self._format = kind
        self._files = files
        self._places = {} if kind is None else _taken(kind, tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def quantisation(self) -> Quantisation | None:
        """The quantisation; None if all matrices are floats, of 8 bits or more."""
        if self._format is None or self._format.block_type(BLOCK) is None or not self._places:
            return None
        return Quantisation(self._format.name, "q4", kept=True)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in self._places}

    def block_type(self, name: str) -> BlockType | None:
        if self._format is None or name not in self._places:
            return None
        return self._format.block_type(self._shape(name)[1])

    def values(self, name: str) -> Array:
        """Return a matrix in f32. Raises BuildError."""
        assert self._format is not None
        return self._format.values(*self._content(name))

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix's blocks; None for floats and for other tensors. Raises BuildError."""
        if self._format is None or name not in self._places:
            return None
        return self._format.blocks(*self._content(name))

    def _content(self, name: str) -> tuple[str, dict[str, Array]]:
        """Return a matrix's name for errors, and its tensors."""
        places = self._places[name].items()
        return f"{self._where}: `{name}`", {
            ending: read_tensor(self._files, place) for ending, place in places
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        assert self._format is not None
        places = self._places[name].items()
        shapes = {ending: tuple(self._files[path].get_slice(n).get_shape()) for ending, (path, n) in places}
        if missing := [ending for ending in self._format.needed if ending not in shapes]:
            raise BuildError(f"{self._where}: `{name}` lacks `{missing[0]}`")
        if odd := [ending for ending in self._format.needed if len(shapes[ending]) != 2]:
            raise BuildError(f"{self._where}: `{odd[0]}` of `{name}` is no matrix")
        return self._format.shape(shapes)


def read_tensor(files: Mapping[Path, Any], place: Place) -> Array:
    """Read a tensor. Raises BuildError."""
    path, name = place
    try:
        if files[path].get_slice(name).get_dtype() in FP8_TYPES:
            return read_fp8(path, name)
        array: Array = files[path].get_tensor(name)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise BuildError(f"{path}: tensor `{name}` cannot be read ({error})") from error
    return array


def _taken(kind: MatrixFormat, tensors: dict[str, Place]) -> dict[str, dict[str, Place]]:
    """Return the tensors of each quantised matrix by suffix, removing them from `tensors`."""
    stems = (name.rpartition(".") for name in tensors)
    marked = {stem for stem, _, ending in stems if ending in kind.marks}
    endings = {*kind.marks, *kind.needed, *kind.others}
    return {
        f"{stem}.weight": {
            ending: tensors.pop(f"{stem}.{ending}")
            for ending in sorted(endings)
            if f"{stem}.{ending}" in tensors
        }
        for stem in sorted(marked)
    }
