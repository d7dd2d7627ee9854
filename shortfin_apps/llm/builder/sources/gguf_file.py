"""Source: a model in a GGUF file or in split GGUF files, quantised or not.

The format is defined in ggml's docs/gguf.md. For some architectures, llama.cpp's converter makes the two rows
of a rotated pair of q or k adjacent; this module restores the half-split order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor, dequantize

from shortfin_apps.llm.builder.sources.base import (
    Array,
    ModelSource,
    Quantisation,
    TokenizerFiles,
    as_float,
    check_spec,
    check_tensors,
    computing_spec,
    parse,
    row_order,
    sha256_of,
)
from shortfin_apps.llm.builder.sources.gguf_blocks import (
    block_type_of,
    each_matrix,
    is_readable,
    quantisation_of,
    read_blocks,
)
from shortfin_apps.llm.builder.sources.gguf_config import (
    check_keys,
    gguf_family,
    keys_below,
    read_config,
)
from shortfin_apps.llm.builder.sources.gguf_gemma4 import is_unread
from shortfin_apps.llm.builder.sources.gguf_header import parts_of, read_parts
from shortfin_apps.llm.builder.sources.gguf_kinds import check_kind
from shortfin_apps.llm.builder.sources.gguf_latent import halves_of, joined_expansion, with_expansions
from shortfin_apps.llm.builder.sources.gguf_rope import FACTORS
from shortfin_apps.llm.builder.sources.gguf_tokenizer import (
    GgufVocabulary,
    check_lists,
    check_tokenizer,
    rebuild_tokenizer,
    sampling_defaults,
)
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import whole_stem
from shortfin_apps.llm.model.draft_layer import PROJECTION
from shortfin_apps.llm.model.families import OF_ARCHITECTURE
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.weight_blocks import Blocks, BlockType

# A draft layer's embedding and head: copies of the model's in some families, otherwise its own.
_DRAFT_VOCABULARY = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"


class GgufSource(ModelSource):
    """A model in a GGUF file, or in split files of which `path` is one.

    Raises BuildError if a file is damaged or missing, or if the model's family is not supported.
    `sampling`: defaults for `generation_config.json`; `accepted`: unknown keys to ignore.
    """

    def __init__(
        self, path: Path, sampling: Mapping[str, float] | None = None, accepted: Collection[str] = ()
    ) -> None:
        self._where = str(path)
        self._path = path
        self._sampling = sampling or {}
        files = read_parts(path)
        self._metadata = files[0].metadata
        check_kind(self._where, self._metadata)
        family = gguf_family(self._where, self._metadata.get("general.architecture"))
        self._vocabulary = self._read_vocabulary()
        stored = (tensor for file in files for tensor in file.tensors)
        tensors = each_matrix(self._where, stored) if "num_experts" in family.fields else stored
        self._tensors = {_own_name(family.gguf, tensor.name): tensor for tensor in tensors}
        shapes = with_expansions({name: _shape(tensor) for name, tensor in self._tensors.items()})
        with computing_spec(self._where):
            config = self._read_config(family, shapes, accepted)
            self.spec = family.spec(model_name(whole_stem(path.stem)), config)
        prefix = f"blk.{len(self.spec.layers)}."
        vocabulary = [prefix + name for name in _DRAFT_VOCABULARY]
        self._shares_vocabulary = family.copies_vocabulary or not any(name in shapes for name in vocabulary)
        if family.draft and self._shares_vocabulary and f"{prefix}{PROJECTION}" in shapes:
            self.spec = replace(self.spec, draft=family.draft(self.spec))
        check_spec(self._where, self.spec)
        self._num_drafts = config.mtp_num_hidden_layers or 0
        unread = (*FACTORS, *vocabulary)
        shapes = {n: s for n, s in shapes.items() if n not in unread and not self._is_left_out(n)}
        check_tensors(self._where, self.spec, shapes)
        self._check_types()
        check_lists(self._where, self._vocabulary, self.spec.vocab_size)

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]  # computed on use, as it reads the whole files
        return sha256_of(parts_of(self._path))

    @property
    def quantisation(self) -> Quantisation | None:
        return quantisation_of(self._tensors.values())

    @property
    def left_out(self) -> str | None:
        sizes = [int(each.n_bytes) for name, each in self._tensors.items() if self._is_unbuilt(name)]
        text = f"layers of a draft model ({len(sizes)} tensors, {sum(sizes) / 1e6:,.1f} MB)"
        own = "" if self._shares_vocabulary else ", with an embedding or a head of their own"
        return text + own if sizes else None

    def tensor(self, name: str) -> Array:
        halves = None if name in self._tensors else halves_of(name)
        array = joined_expansion(*map(self._dequantised, halves)) if halves else self._dequantised(name)
        order = self._row_order(name)
        return array if order is None else array[order]

    def blocks(self, name: str) -> Blocks | None:
        blocks = read_blocks(self._tensors[name])
        if blocks is None:
            return None
        for terms in blocks.terms:
            as_float(f"{self._where}: tensor `{name}`", terms.values)
        order = self._row_order(name)
        return blocks if order is None else blocks.take_rows(order)

    def block_type(self, name: str) -> BlockType | None:
        return block_type_of(self._tensors[name].tensor_type)

    def _is_left_out(self, name: str) -> bool:
        """Return whether the tensor is of a draft layer that is not built, or that no layer reads."""
        return is_unread(self.spec, name) or self._is_unbuilt(name)

    def _is_unbuilt(self, name: str) -> bool:
        """Return whether the tensor is of a draft layer that is not built."""
        first = len(self.spec.all_layers)
        unbuilt = (f"blk.{number}." for number in range(first, len(self.spec.layers) + self._num_drafts))
        return name.startswith(tuple(unbuilt))

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Return, for each row of tensor `name`, its row index in the file; None if the order is the same."""
        if not OF_ARCHITECTURE[self.spec.architecture].gguf.pairs:
            return row_order(self.spec, name)
        attention = self.spec.attention
        if name.endswith((".attn_q.weight", ".attn_q.bias")):
            return _half_split(attention.heads, attention.head_dim)
        if name.endswith((".attn_k.weight", ".attn_k.bias")):
            return _half_split(attention.kv_heads, attention.head_dim)
        return None

    def tokenizer_files(self) -> TokenizerFiles:
        files = rebuild_tokenizer(self._where, self._vocabulary)
        sampling = sampling_defaults(keys_below(self._metadata, "general.sampling."))
        return replace(files, generation={**files.generation, **sampling, **self._sampling})

    def _read_vocabulary(self) -> GgufVocabulary:
        keys = keys_below(self._metadata, "tokenizer.")
        if "ggml.model" not in keys:
            raise BuildError(f"{self._where}: has no tokenizer")
        check_tokenizer(self._where, str(keys["ggml.model"]), keys.get("ggml.pre"))
        return parse(self._where, GgufVocabulary, keys)

    def _read_config(
        self, family: Family, shapes: Mapping[str, tuple[int, ...]], accepted: Collection[str]
    ) -> Config:
        keys = keys_below(self._metadata, f"{family.architecture}.")
        factors = {name: self._dequantised(name) for name in FACTORS if name in self._tensors}
        config = read_config(self._where, family, keys, shapes, factors)
        check_keys(self._where, family, self._metadata, accepted)
        return config

    def _check_types(self) -> None:
        """Raise BuildError for a tensor of a type that cannot be read."""
        odd = (each for each in self._tensors.values() if not is_readable(each.tensor_type))
        if tensor := next(odd, None):
            raise BuildError(
                f"{self._where}: tensor `{tensor.name}` is of type {tensor.tensor_type.name}, which cannot "
                "be read; download the model in another type"
            )

    def _dequantised(self, name: str) -> Array:
        tensor = self._tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        except (NotImplementedError, ValueError) as error:
            raise BuildError(f"{self._where}: tensor `{name}` cannot be dequantised ({error})") from error
        return as_float(f"{self._where}: tensor `{name}`", array)


def _own_name(gguf: Gguf, name: str) -> str:
    """Return our name of the tensor called `name` in the file."""
    *block, kind, suffix = name.split(".") if name.count(".") > 1 else [name, ""]
    if whole := gguf.names.get(f"{kind}.{suffix}"):
        return ".".join([*block, whole])
    renamed = gguf.names.get(kind)
    return ".".join([*block, renamed, suffix]) if renamed else name


def model_name(stem: str) -> str:
    """Return the model's name: the file's stem without the quantisation suffix, such as `-Q4_K_M`.

    The key `general.name` in the file is not used, as it is often meaningless.
    """
    return re.sub(r"[.-](UD-)?([IT]?Q\d\w*|MXFP4\w*|B?F16|F32)$", "", stem, flags=re.IGNORECASE)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Return the tensor's shape, as [1, in] for the gate of a shared expert (a vector in files)."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return (1, *shape) if tensor.name.endswith(_SHARED_GATE) and len(shape) == 1 else shape


def _half_split(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Return the row order from `[heads, head_dim / 2, 2]` (llama.cpp's) to `[heads, 2, head_dim / 2]`."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
