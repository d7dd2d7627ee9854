"""gpt-oss's experts in a Hugging Face directory: one tensor per projection holds all experts of a layer.

    mlp.experts.gate_up_proj         [experts, in, out] floats
    mlp.experts.gate_up_proj_blocks  [experts, out, in / 32, 16] u8, and
    mlp.experts.gate_up_proj_scales  [experts, out, in / 32] u8, which replace it: MXFP4 (mxfp4.py)
    mlp.experts.gate_up_proj_bias    [experts, out]

`down_proj` is stored likewise. Outputs of `gate_up_proj` alternate between gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from shortfin_apps.llm.builder.sources.base import Array, Quantisation, as_float
from shortfin_apps.llm.builder.sources.hf_matrices import Place
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_EXPERTS, check_at_most
from shortfin_apps.llm.builder.sources.mxfp4 import mxfp4_blocks
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.weight_blocks import BLOCK, MXFP4, Blocks, BlockType

_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
# The outputs of a projection that a kind of tensor has.
_OUTPUTS = {
    "gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)},
    "down": {"down": slice(None)},
}
_RANKS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensor of one expert: `outputs` of its share of the tensors in `stack`, by suffix."""

    stack: Mapping[str, Place]
    expert: int
    outputs: slice
    is_bias: bool

    @property
    def is_mxfp4(self) -> bool:
        return not self.is_bias and "_blocks" in self.stack


class StackedExperts:
    """The experts' tensors, removed from `tensors`; `files` are opened by safetensors.

    Raises BuildError for a projection that lacks a tensor or has one of another rank or type, and for more
    experts than any model has.
    """

    def __init__(self, where: str, tensors: dict[str, Place], files: Mapping[Path, Any]) -> None:
        self._where = where
        self._files = files
        self._num_experts = 0
        stacks: dict[tuple[str, str], dict[str, Place]] = {}
        for name in list(tensors):
            if match := _STACK.fullmatch(name):
                layer, projection, ending = match.groups()
                stacks.setdefault((layer, projection), {})[ending or ""] = tensors.pop(name)
        self._parts = {
            name: part
            for (layer, projection), stack in stacks.items()
            for name, part in self._parts_of(layer, projection, stack).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    @property
    def quantisation(self) -> Quantisation | None:
        is_quantised = any(part.is_mxfp4 for part in self._parts.values())
        return Quantisation("MXFP4", "q4", kept=True) if is_quantised else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(part) for name, part in self._parts.items()}

    def block_type(self, name: str) -> BlockType | None:
        return MXFP4 if name in self._parts and self._parts[name].is_mxfp4 else None

    def values(self, name: str) -> Array:
        """Return a matrix [out, in] or a bias [out]. Raises BuildError."""
        blocks, part = self.blocks(name), self._parts[name]
        if blocks is not None:
            return blocks.dequantise()
        if part.is_bias:
            return self._read(part, "_bias")[part.outputs]
        return np.ascontiguousarray(self._read(part, "").T[part.outputs])

    def blocks(self, name: str) -> Blocks | None:
        """Return the blocks of an MXFP4 matrix; None for other tensors. Raises BuildError."""
        part = self._parts.get(name)
        if part is None or not part.is_mxfp4:
            return None
        quants, scales = (self._read(part, ending)[part.outputs] for ending in ("_blocks", "_scales"))
        blocks = mxfp4_blocks(_in_turn(quants), scales)
        as_float(f"{self._where}: `{name}`", blocks.scales.values)
        return blocks

    def _parts_of(self, layer: str, projection: str, stack: Mapping[str, Place]) -> dict[str, _Part]:
        """Return the tensors of one projection of a layer, by GGUF name."""
        weights = stack.keys() - {"_bias"}
        if weights != {""} and weights != {"_blocks", "_scales"}:
            problem = "has several forms of" if "" in weights else "lacks"
            raise BuildError(f"{self._where}: layer {layer} {problem} `mlp.experts.{projection}_proj`")
        for ending, (path, name) in stack.items():
            if len(shape := self._stored_shape((path, name))) != _RANKS[ending]:
                raise BuildError(
                    f"{path}: tensor `{name}` has shape {shape}, not {_RANKS[ending]} dimensions"
                )
        if "" not in stack:
            self._check_mxfp4(stack["_blocks"], stack["_scales"])
        count = min(self._stored_shape(place)[0] for place in stack.values())
        self._num_experts += count  # unlimited by the file's size, if the experts are empty
        check_at_most(self._where, "its tensors hold {} experts", self._num_experts, MAX_EXPERTS)
        return {
            f"blk.{layer}.ffn_{kind}.{expert}.{suffix}": _Part(stack, expert, outputs, suffix == "bias")
            for expert in range(count)
            for kind, outputs in _OUTPUTS[projection].items()
            for suffix in ("weight", *(["bias"] if "_bias" in stack else []))
        }

    def _check_mxfp4(self, blocks: Place, scales: Place) -> None:
        """Raises BuildError unless these are bytes, and each block has a scale."""
        wanted = self._stored_shape(blocks)[:-1]
        for (path, name), shape in ((blocks, (*wanted, BLOCK // 2)), (scales, wanted)):
            found = (self._files[path].get_slice(name).get_dtype(), self._stored_shape((path, name)))
            if found != ("U8", shape):
                raise BuildError(
                    f"{path}: tensor `{name}` is {found[0]} of {found[1]}, expected U8 of {shape}"
                )

    def _shape(self, part: _Part) -> tuple[int, ...]:
        if part.is_bias:
            return (self._outputs(part, self._stored_shape(part.stack["_bias"])[1]),)
        if not part.is_mxfp4:
            _, in_features, out_features = self._stored_shape(part.stack[""])
            return self._outputs(part, out_features), in_features
        _, out_features, blocks, _ = self._stored_shape(part.stack["_blocks"])
        return self._outputs(part, out_features), blocks * BLOCK

    def _outputs(self, part: _Part, all_outputs: int) -> int:
        return len(range(all_outputs)[part.outputs])

    def _stored_shape(self, place: Place) -> tuple[int, ...]:
        path, name = place
        return tuple(self._files[path].get_slice(name).get_shape())

    def _read(self, part: _Part, ending: str) -> Array:
        """Read the expert's share of a tensor."""
        path, name = part.stack[ending]
        try:
            array: Array = self._files[path].get_slice(name)[part.expert]
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise BuildError(f"{path}: tensor `{name}` cannot be read ({error})") from error
        return array


def _in_turn(packed: Array) -> Array:
    """Unpack the 4-bit values of bytes [.., 16], lower bits first: [.., 32] u8."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
