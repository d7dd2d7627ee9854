"""Source: a Hugging Face model directory: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from shortfin_apps.llm.builder.sources import hf_draft
from shortfin_apps.llm.builder.sources.base import (
    FLOAT_TYPES,
    Array,
    ModelSource,
    Quantisation,
    TokenizerFiles,
    as_float,
    check_spec,
    check_tensors,
    computing_spec,
    row_order,
    sha256_of,
    unsupported,
)
from shortfin_apps.llm.builder.sources.hf_config import hf_family, read_config
from shortfin_apps.llm.builder.sources.hf_files import read_json, tokenizer_files, weight_files
from shortfin_apps.llm.builder.sources.hf_matrices import (
    ExpertTensor,
    Place,
    QuantisedMatrix,
    quantised_matrices,
    read_tensor,
    stacked_experts,
)
from shortfin_apps.llm.builder.sources.hf_quantised import UNDECLARED_FP8, matrix_format
from shortfin_apps.llm.builder.sources.hf_text_part import described, text_config, text_name
from shortfin_apps.llm.builder.sources.hf_tokenizer import read_tokenizer
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_NAME_CHARS, check_at_most
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.weight_blocks import Blocks, BlockType

_EXPERT = re.compile(r"(?:(?:mlp|block_sparse_moe)\.)?experts\.(\d+)\.(\w+)")
_OF_EXPERT = {"w1": "gate", "w2": "down", "w3": "up"} | {
    f"{kind}_proj": kind for kind in ("gate", "up", "down")
}
# Frequencies of the rotation, and scales of a quantised KV cache, neither of which is read.
_IGNORED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


class HfDirectorySource(ModelSource):
    """A Hugging Face directory. Raises BuildError if a file is missing or the family is not supported.

    `name`: the model's name, by default the directory's; `accepted`: unknown fields of `config.json` to
    ignore.
    """

    def __init__(self, directory: Path, name: str | None = None, accepted: Collection[str] = ()) -> None:
        self._directory = directory
        self._where = str(directory)
        whole = read_json(directory / "config.json")
        raw = text_config(self._where, whole)
        self._family = hf_family(self._where, raw)
        with computing_spec(f"{self._where}/config.json"):
            config, self._given = read_config(self._where, self._family, raw, accepted)
            self.spec = self._family.spec(name or directory.resolve().name, config)
        check_spec(self._where, self.spec)
        shards = [directory / name for name in weight_files(directory)]
        self._files = {path: open_weights(path) for path in shards}
        names = {text_name(name) or "" for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        if raw is not whole:
            self.spec = replace(self.spec, tie_word_embeddings="lm_head.weight" not in names)
        if self._family.draft and hf_draft.has_draft_layer(self._family, names):
            self.spec = replace(self.spec, draft=self._family.draft(self.spec))
        self._others: list[Place] = []  # tensors of vision and audio towers
        self._drafts: list[Place] = []  # tensors of draft layers that are not built
        self._tensors = dict(self._find_tensors())
        self._matrices = self._find_matrices()
        check_tensors(self._where, self.spec, self._shapes())
        self.sha256 = sha256_of([*shards, directory / "config.json", *tokenizer_files(directory)])

    @property
    def quantisation(self) -> Quantisation | None:
        return next((q for q in (each.quantisation for each in self._matrices.values()) if q), None)

    @property
    def left_out(self) -> str | None:
        parts = {
            "vision and audio parts ({}), as only text is supported": self._others,
            "layers of a draft model ({})": self._drafts,
        }
        texts = [text.format(self._described(places)) for text, places in parts.items() if places]
        return "; ".join(texts) or None

    def _described(self, places: Sequence[Place]) -> str:
        return described(self._files[path].get_slice(name) for path, name in places)

    def tensor(self, name: str) -> Array:
        if name in self._matrices:
            array = as_float(f"{self._where}: `{name}`", self._matrices[name].values())
        else:
            path, hf_name = place = self._tensors[name]
            array = read_tensor(self._files, place)
            array = array.astype(np.float32) if array.itemsize == 1 else array  # 8-bit floats
            array = as_float(f"{path}: tensor `{hf_name}`", array)
        if self._family.norms_from_zero and name.endswith("norm.weight"):
            array = array.astype(np.float32) + (not name.endswith("ssm_norm.weight"))
        if name.endswith("ssm_a"):
            array = -np.exp(array.astype(np.float32))
        if name.endswith("ssm_conv1d.weight"):
            array = array.reshape(_matrix_of(array.shape))
        order = row_order(self.spec, name)
        return array if order is None else array[order]

    def blocks(self, name: str) -> Blocks | None:
        blocks = self._matrices[name].blocks() if name in self._matrices else None
        order = row_order(self.spec, name)
        return blocks if order is None or blocks is None else blocks.take_rows(order)

    def block_type(self, name: str) -> BlockType | None:
        return self._matrices[name].block_type if name in self._matrices else None

    def tokenizer_files(self) -> TokenizerFiles:
        return read_tokenizer(self._directory, self._given.eos_token_id)

    def _find_tensors(self) -> Iterator[tuple[str, tuple[Path, str]]]:
        for path, file in self._files.items():
            for hf_name in file.keys():  # noqa: SIM118  (not a mapping)
                check_at_most(str(path), "a tensor's name has {} characters", len(hf_name), MAX_NAME_CHARS)
                name = text_name(hf_name) if self._family.part_of else hf_name
                if name is None:
                    self._others.append((path, hf_name))
                    continue
                if self._family.has_draft_layers:
                    name = hf_draft.in_layers(name, len(self.spec.layers))
                    if hf_draft.is_left_out(self.spec, name):
                        self._drafts.append((path, hf_name))
                        continue
                    if hf_draft.is_copy(self.spec, name):
                        continue
                ours = _gguf_name(name, {**llama.NAMES, **hf_draft.NAMES, **self._family.names})
                tied = ours == "output.weight" and self.spec.tie_word_embeddings
                if not tied and not hf_name.endswith(_IGNORED):
                    yield ours, (path, hf_name)

    def _find_matrices(self) -> Mapping[str, QuantisedMatrix | ExpertTensor]:
        """Return the matrices not stored as one tensor each, and remove their tensors from `_tensors`."""
        quantisation, stacks = self._given.quantization_config, self._family.stacks_experts
        if stacks and (quantisation or {}).get("quant_method") in (None, "mxfp4"):
            return stacked_experts(self._where, stacks, self._tensors, self._files)
        kind = matrix_format(self._where, quantisation) or (UNDECLARED_FP8 if self._has_fp8() else None)
        return quantised_matrices(self._where, kind, self._tensors, self._files) if kind else {}

    def _has_fp8(self) -> bool:
        headers = (self._files[path].get_slice(name) for path, name in self._tensors.values())
        return any(header.get_dtype() == "F8_E4M3" for header in headers)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        quantised = self._given.quantization_config
        shapes = {name: each.shape for name, each in self._matrices.items()}
        for name, (path, hf_name) in self._tensors.items():
            header = self._files[path].get_slice(hf_name)
            if header.get_dtype() not in (*FLOAT_TYPES, *([] if quantised else ["F8_E4M3"])):
                raise unsupported(str(path), f"tensor `{hf_name}` of type {header.get_dtype()}")
            shapes[name] = tuple(header.get_shape())
            if name.endswith("ssm_conv1d.weight"):
                shapes[name] = _matrix_of(shapes[name])
        return shapes


def open_weights(path: Path) -> Any:
    """Open a safetensors file. Raises BuildError."""
    if not path.exists():
        raise BuildError(f"{path}: no such file; weights must be in safetensors form")
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{path}: not a readable safetensors file ({error})") from error


def _matrix_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return [channels, taps] for a depthwise convolution's shape [channels, 1, taps]; others unchanged."""
    return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape


def _gguf_name(name: str, names: Mapping[str, str]) -> str:
    """Return the GGUF name of the Hugging Face tensor `name`; `name` itself if it is unknown.

    `names`: Hugging Face's names -> GGUF names, for kinds of tensors.
    """
    stem, dot, kind = name.rpartition(".")
    if match := _BLOCK.fullmatch(name):
        layer, part = match.groups()
        if part in names:
            return f"blk.{layer}.{names[part]}"
        part = part.removesuffix(f"{dot}{kind}")
        if expert := _EXPERT.fullmatch(part):
            return f"blk.{layer}.ffn_{_OF_EXPERT.get(expert[2], expert[2])}.{expert[1]}{dot}{kind}"
        return f"blk.{layer}.{names[part]}{dot}{kind}" if part in names else name
    return f"{names[stem]}{dot}{kind}" if stem in names else name
