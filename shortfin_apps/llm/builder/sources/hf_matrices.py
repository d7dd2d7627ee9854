"""Read the matrices of a Hugging Face directory that are not stored as one tensor each.

A quantised matrix consists of several tensors (hf_quantised.py). gpt-oss has one tensor for all experts of a
layer:

    mlp.experts.gate_up_proj         [experts, in, out] floats
    mlp.experts.gate_up_proj_blocks  [experts, out, in / 32, 16] u8, and
    mlp.experts.gate_up_proj_scales  [experts, out, in / 32] u8, which replace it: MXFP4
    mlp.experts.gate_up_proj_bias    [experts, out]

`down_proj` is stored likewise. The output features of `gate_up_proj` alternate between gate and up. Qwen3.5
may have `gate_up_proj` [experts, out, in] and `down_proj`, both in floats, with all gates before all ups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError

from shortfin_apps.llm.builder.sources.base import Array, Quantisation, as_float, mxfp4_blocks
from shortfin_apps.llm.builder.sources.hf_quantised import MatrixFormat
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_EXPERTS, check_at_most
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families.family import ExpertStack
from shortfin_apps.llm.model.weight_blocks import BLOCK, MXFP4, Blocks, BlockType

Place = tuple[Path, str]  # a file, and the name of a tensor in it
Files = Mapping[Path, Any]  # opened by safetensors

_FP8_TYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
_SIZE_BYTES = 8
_STACK = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.)?experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
_RANKS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix in the format `kind`; `places`: suffix -> tensor."""

    where: str
    name: str
    kind: MatrixFormat
    places: Mapping[str, Place]
    files: Files

    @property
    def quantisation(self) -> Quantisation | None:
        """The quantisation; None for 8-bit floats."""
        is_float = self.kind.block_type(BLOCK) is None
        return None if is_float else Quantisation(self.kind.name, "q4", kept=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape. Raises BuildError if a tensor is missing or is no matrix."""
        shapes = {ending: _stored_shape(self.files, place) for ending, place in self.places.items()}
        if missing := [ending for ending in self.kind.needed if ending not in shapes]:
            raise BuildError(f"{self.where}: `{self.name}` lacks `{missing[0]}`")
        if odd := [ending for ending in self.kind.needed if len(shapes[ending]) != 2]:
            raise BuildError(f"{self.where}: `{odd[0]}` of `{self.name}` is no matrix")
        return self.kind.shape(shapes)

    @property
    def block_type(self) -> BlockType | None:
        return self.kind.block_type(self.shape[1])

    def values(self) -> Array:
        """Return the matrix in f32. Raises BuildError."""
        return self.kind.values(f"{self.where}: `{self.name}`", self._tensors())

    def blocks(self) -> Blocks | None:
        """Return the matrix's blocks; None for floats. Raises BuildError."""
        return self.kind.blocks(f"{self.where}: `{self.name}`", self._tensors())

    def _tensors(self) -> dict[str, Array]:
        return {ending: read_tensor(self.files, place) for ending, place in self.places.items()}


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The matrix or the bias of one expert, a slice of the tensors of all experts.

    `stack`: suffix -> tensor of all experts; `outputs`: the slice of output features.
    """

    where: str
    name: str
    stack: Mapping[str, Place]
    expert: int
    outputs: slice
    files: Files
    form: ExpertStack = ExpertStack.ALTERNATING

    @property
    def quantisation(self) -> Quantisation | None:
        return Quantisation("MXFP4", "q4", kept=True) if self.block_type else None

    @property
    def shape(self) -> tuple[int, ...]:
        if self._is_bias:
            return (self._num_outputs(_stored_shape(self.files, self.stack["_bias"])[1]),)
        if self.block_type is None:
            _, *sizes = _stored_shape(self.files, self.stack[""])
            out_features, in_features = sizes if self.form is ExpertStack.HALVES else reversed(sizes)
            return self._num_outputs(out_features), in_features
        _, out_features, blocks, _ = _stored_shape(self.files, self.stack["_blocks"])
        return self._num_outputs(out_features), blocks * BLOCK

    @property
    def block_type(self) -> BlockType | None:
        return MXFP4 if "_blocks" in self.stack and not self._is_bias else None

    def values(self) -> Array:
        """Return a matrix [out, in] or a bias [out]. Raises BuildError."""
        if (blocks := self.blocks()) is not None:
            return blocks.dequantise()
        if self._is_bias:
            return self._read("_bias")[self.outputs]
        matrix = self._read("") if self.form is ExpertStack.HALVES else self._read("").T
        return np.ascontiguousarray(matrix[self.outputs])

    def blocks(self) -> Blocks | None:
        """Return the blocks of an MXFP4 matrix; None for other tensors. Raises BuildError."""
        if self.block_type is None:
            return None
        packed, scales = (self._read(ending)[self.outputs] for ending in ("_blocks", "_scales"))
        quants = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
        blocks = mxfp4_blocks(quants, scales)
        as_float(f"{self.where}: `{self.name}`", blocks.scales.values)
        return blocks

    @property
    def _is_bias(self) -> bool:
        return self.name.endswith(".bias")

    def _num_outputs(self, all_outputs: int) -> int:
        return len(range(all_outputs)[self.outputs])

    def _read(self, ending: str) -> Array:
        """Read the expert's slice of the stacked tensor with the suffix `ending`."""
        path, name = self.stack[ending]
        try:
            array: Array = self.files[path].get_slice(name)[self.expert]
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise BuildError(f"{path}: tensor `{name}` cannot be read ({error})") from error
        return array


def quantised_matrices(
    where: str, kind: MatrixFormat, tensors: dict[str, Place], files: Files
) -> dict[str, QuantisedMatrix]:
    """Return name -> matrix for all matrices in the format `kind`; remove their tensors from `tensors`."""
    stems = (name.rpartition(".") for name in tensors)
    marked = {stem for stem, _, ending in stems if ending in kind.marks}
    endings = sorted({*kind.marks, *kind.needed, *kind.others})
    found = {}
    for stem in sorted(marked):
        places = {each: tensors.pop(f"{stem}.{each}") for each in endings if f"{stem}.{each}" in tensors}
        found[f"{stem}.weight"] = QuantisedMatrix(where, f"{stem}.weight", kind, places, files)
    return found


def stacked_experts(
    where: str, form: ExpertStack, tensors: dict[str, Place], files: Files
) -> dict[str, ExpertTensor]:
    """Return GGUF name -> tensor for all experts, and remove the stacked tensors from `tensors`.

    Raises BuildError for a projection with a missing tensor or one of unexpected rank or type, and for more
    than MAX_EXPERTS experts.
    """
    stacks: dict[tuple[str, str], dict[str, Place]] = {}
    for name in list(tensors):
        if match := _STACK.fullmatch(name):
            layer, projection, ending = match.groups()
            stacks.setdefault((layer, projection), {})[ending or ""] = tensors.pop(name)
    found, num_experts = {}, 0
    for (layer, projection), stack in stacks.items():
        _check_stack(where, layer, projection, stack, files)
        if form is ExpertStack.HALVES and stack.keys() != {""}:
            raise BuildError(
                f"{where}: layer {layer} has biases or blocks of experts, which its family lacks"
            )
        count = min(_stored_shape(files, place)[0] for place in stack.values())
        num_experts += count  # checked, as a small file can claim many experts of size 0
        check_at_most(where, "its tensors hold {} experts", num_experts, MAX_EXPERTS)
        for expert in range(count):
            for kind, outputs in _outputs(projection, form, stack, files).items():
                for suffix in ("weight", *(["bias"] if "_bias" in stack else [])):
                    name = f"blk.{layer}.ffn_{kind}.{expert}.{suffix}"
                    found[name] = ExpertTensor(where, name, stack, expert, outputs, files, form)
    return found


def _outputs(
    projection: str, form: ExpertStack, stack: Mapping[str, Place], files: Files
) -> dict[str, slice]:
    """Return the kind of GGUF tensor -> its output features in the projection."""
    if projection == "down":
        return {"down": slice(None)}
    if form is ExpertStack.ALTERNATING:
        return {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    half = _stored_shape(files, stack[""])[1] // 2
    return {"gate": slice(half), "up": slice(half, None)}


def _check_stack(where: str, layer: str, projection: str, stack: Mapping[str, Place], files: Files) -> None:
    """Raise BuildError unless `stack` has all tensors of the projection, with expected ranks and types."""
    weights = stack.keys() - {"_bias"}
    if weights != {""} and weights != {"_blocks", "_scales"}:
        problem = "has several forms of" if "" in weights else "lacks"
        raise BuildError(f"{where}: layer {layer} {problem} `mlp.experts.{projection}_proj`")
    for ending, (path, name) in stack.items():
        if len(shape := _stored_shape(files, (path, name))) != _RANKS[ending]:
            raise BuildError(f"{path}: tensor `{name}` has shape {shape}, not {_RANKS[ending]} dimensions")
    if "" in stack:
        return
    wanted = _stored_shape(files, stack["_blocks"])[:-1]
    for (path, name), shape in ((stack["_blocks"], (*wanted, BLOCK // 2)), (stack["_scales"], wanted)):
        dtype, found = files[path].get_slice(name).get_dtype(), _stored_shape(files, (path, name))
        if (dtype, found) != ("U8", shape):
            raise BuildError(f"{path}: tensor `{name}` is {dtype} of {found}, expected U8 of {shape}")


def read_tensor(files: Files, place: Place) -> Array:
    """Read a whole tensor. Raises BuildError."""
    path, name = place
    try:
        if files[path].get_slice(name).get_dtype() in _FP8_TYPES:
            return _read_fp8(path, name)
        array: Array = files[path].get_tensor(name)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise BuildError(f"{path}: tensor `{name}` cannot be read ({error})") from error
    return array


def _read_fp8(path: Path, name: str) -> Array:
    """Read 8-bit floats, which the safetensors library cannot convert to numpy.

    Callers must have opened the file with the library before, which checks the header.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_SIZE_BYTES), "little")
        entry = json.loads(file.read(header_bytes))[name]
    dtype, offset = _FP8_TYPES[entry["dtype"]], _SIZE_BYTES + header_bytes + entry["data_offsets"][0]
    return np.fromfile(path, dtype, int(np.prod(entry["shape"])), offset=offset).reshape(entry["shape"])


def _stored_shape(files: Files, place: Place) -> tuple[int, ...]:
    path, name = place
    return tuple(files[path].get_slice(name).get_shape())
