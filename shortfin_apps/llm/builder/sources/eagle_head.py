"""Source: an EAGLE-3 head, as its directory of `config.json` and safetensors, on top of a model's source."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

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
    parse,
    row_order,
    sha256_of,
)
from shortfin_apps.llm.builder.sources.hf_config import read_config
from shortfin_apps.llm.builder.sources.hf_directory import open_weights
from shortfin_apps.llm.builder.sources.hf_files import read_json, weight_files
from shortfin_apps.llm.builder.sources.hf_matrices import Place, read_tensor
from shortfin_apps.llm.builder.sources.known_fields import KnownFields, names
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.draft_layer import EMBEDDING_NORM, HIDDEN_NORM, RESULT_NORM
from shortfin_apps.llm.model.eagle_head import HEAD, HEAD_ROWS, ROW_ALIGNMENT, EagleHead, depth_weight
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Size
from shortfin_apps.llm.model.spec import ModelSpec, tensor_shapes
from shortfin_apps.llm.model.weight_blocks import Blocks, BlockType

NUM_READS = 3  # main layers whose results a head reads
# A head's copy of the model's embedding may differ by this share, as of rounding to 4 bits.
MAX_COPY_ERROR = 0.2

_PROJECTION, _ROWS_TO_TOKENS, _EMBEDDING = "fc.weight", "d2t", "embed_tokens.weight"
_OF_LAYER, _OF_HEAD = "transformer_layer_config", "eagle_config"  # as speculators and others write them
_LAYER = re.compile(r"(?:midlayer|layers\.0)\.(.+)")
# Names of tensors -> ours, in addition to a Llama's; the input's norm is the embedding's norm.
_NAMES = {
    "hidden_norm.weight": HIDDEN_NORM,
    "input_layernorm.weight": EMBEDDING_NORM,
    "norm.weight": RESULT_NORM,
    "lm_head.weight": HEAD,
}
_FAMILY = replace(llama.LLAMA, title="EAGLE-3 heads", fields=frozenset({"max_window_layers"}))


class _HeadFields(BaseModel):
    """The fields of a head's `config.json` that models do not have."""

    model_config = ConfigDict(extra="ignore")

    vocab_size: Size
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


_FIELDS = KnownFields(
    used=frozenset(_HeadFields.model_fields),
    # What its training or export recorded.
    harmless=names(
        "speculators_config speculators_model_type speculators_version has_no_defaults_at_init "
        "auto_map target_model_type next_layer_regular parallel_draft_heads_num_layers embed_requires_grad"
    ),
    neutral={
        "use_aux_hidden_state": (True,),
        "num_aux_hidden_states": (NUM_READS,),
        "use_input_layernorm_in_first_layer": (True,),
        "use_last_layernorm": (True,),
        "use_mtp_layernorm": (),
        "norm_before_fc": (),
        "norm_output": (),
        "fc_norm": (),
        "has_lm_head": (True,),
        "parallel_draft_step": (1,),
        "num_hidden_layers": (1,),
    },
)


class EagleHeadSource(ModelSource):
    """A model with an EAGLE-3 head, which replaces the model's own draft layer, if it has one.

    `accepted`: unknown fields of the head's `config.json` to ignore.
    """

    def __init__(self, model: ModelSource, directory: Path, accepted: Collection[str] = ()) -> None:
        self._model = model
        self._where = where = str(directory)
        shards = [directory / name for name in weight_files(directory)]
        self._files = {path: open_weights(path) for path in shards}
        self._places = dict(self._find_tensors())
        fields, config = self._read_config(directory, accepted)
        _check_fits(where, model.spec, fields, config)
        with computing_spec(f"{where}/config.json"):
            head = self._head(fields, config)
        self._prefix = f"blk.{len(model.spec.layers)}."
        self.spec = replace(model.spec, draft=head)
        check_spec(where, self.spec)
        self._check_layout(head)
        self._check_tensors(head, fields)
        self._check_embedding()
        own = sha256_of([*shards, directory / "config.json"])
        self.sha256 = hashlib.sha256(f"{model.sha256} {own}".encode()).hexdigest()

    @property
    def quantisation(self) -> Quantisation | None:
        return self._model.quantisation

    @property
    def left_out(self) -> str | None:
        own = "the model's own draft layer, which the EAGLE-3 head replaces"
        parts = [self._model.left_out, own if self._model.spec.draft is not None else None]
        return "; ".join(part for part in parts if part) or None

    def tokenizer_files(self) -> TokenizerFiles:
        return self._model.tokenizer_files()

    def tensor(self, name: str) -> Array:
        if not name.startswith(self._prefix):
            return self._model.tensor(name)
        own = name.removeprefix(self._prefix)
        if own == HEAD_ROWS:
            return self._head_rows()
        for index in range(NUM_READS):
            if own == depth_weight(index):
                return np.split(self._read(_PROJECTION), NUM_READS, axis=1)[index]
        array, order = self._read(own), row_order(self.spec, name)
        if own == HEAD:
            return np.pad(array, ((0, tensor_shapes(self.spec)[name][0] - len(array)), (0, 0)))
        return array if order is None else array[order]

    def blocks(self, name: str) -> Blocks | None:
        return None if name.startswith(self._prefix) else self._model.blocks(name)

    def block_type(self, name: str) -> BlockType | None:
        return None if name.startswith(self._prefix) else self._model.block_type(name)

    def _find_tensors(self) -> Iterator[tuple[str, Place]]:
        """Yield our name of each tensor, and its place; of tensors that are not weights, the file's name."""
        for path, file in self._files.items():
            for hf_name in file.keys():  # noqa: SIM118  (not a mapping)
                name = hf_name.removeprefix("model.")
                match = _LAYER.fullmatch(name)
                part = match[1] if match else name
                stem, _, kind = part.rpartition(".")
                if part in _NAMES:
                    name = _NAMES[part]
                elif match and stem in llama.NAMES:
                    name = f"{llama.NAMES[stem]}.{kind}"
                if name != "t2d":  # which tokens `d2t` has
                    yield name, (path, hf_name)

    def _read(self, name: str) -> Array:
        path, hf_name = place = self._places[name]
        return as_float(f"{path}: tensor `{hf_name}`", read_tensor(self._files, place))

    def _read_config(self, directory: Path, accepted: Collection[str]) -> tuple[_HeadFields, Config]:
        """Read `config.json`, whose fields may also be in objects of the layer's and of the head's."""
        file = f"{directory}/config.json"
        raw = read_json(directory / "config.json")
        parts = {name: raw.pop(name, None) or {} for name in (_OF_LAYER, _OF_HEAD)}
        if odd := [name for name, part in parts.items() if not isinstance(part, dict)]:
            raise BuildError(f"{file}: `{odd[0]}` must be an object")
        raw |= parts[_OF_LAYER]
        own = parts[_OF_HEAD]
        known = {*_FIELDS.used, *_FIELDS.harmless, *_FIELDS.neutral}
        own |= {name: value for name, value in raw.items() if name in known}
        _FIELDS.check(file, own, accepted)
        fields = parse(file, _HeadFields, own)
        of_layer = {
            name: value for name, value in raw.items() if name not in known or name in Config.model_fields
        }
        config, _ = read_config(str(directory), _FAMILY, {**of_layer, "model_type": "llama"}, accepted)
        return fields, config

    def _head(self, fields: _HeadFields, config: Config) -> EagleHead:
        spec = self._model.spec
        attention, feed_forward = llama.attention(config, 0), llama.mlp(config)
        ropes = {each.rope for each in spec.rotations if each.rope is not None}
        rope = config.rope
        same = next((each for each in ropes if replace(each, name=rope.name) == rope), None)
        attention = replace(attention, rope=same or replace(rope, name="draft"), norm_before=False)
        head_rows = (fields.draft_vocab_size or spec.vocab_size) if HEAD in self._places else None
        maps_rows = head_rows is not None and _ROWS_TO_TOKENS in self._places
        if head_rows is not None and maps_rows:
            head_rows = -(-head_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return EagleHead(
            blocks=(attention, feed_forward),
            reads=_depths(self._where, len(spec.layers), fields.eagle_aux_hidden_state_layer_ids),
            vocab_size=spec.vocab_size,
            head_rows=head_rows,
            maps_rows=maps_rows,
            norm_before_residual=fields.norm_before_residual,
        )

    def _check_layout(self, head: EagleHead) -> None:
        """Raise BuildError unless the head's keys and values have the shape of the model's."""
        where, own = self._where, head.attention.kv_layout
        if own is None or own.pool != "whole":
            raise BuildError(f"{where}: a window in an EAGLE-3 head is not supported")
        for _, layout in self._model.spec.kv_layouts:
            if layout.pool == own.pool and layout != own:
                raise BuildError(
                    f"{where}: the head's keys and values ({head.attention.kv_heads} heads of "
                    f"{head.attention.head_dim}) are stored in the model's pages, which have another shape; "
                    "use a head with the model's key/value heads"
                )

    def _check_tensors(self, head: EagleHead, fields: _HeadFields) -> None:
        """Raise BuildError unless the files have the tensors of the head, in its shapes."""
        hidden, prefix = self.spec.hidden_size, self._prefix
        found = {}
        for name, (path, hf_name) in self._places.items():
            header = self._files[path].get_slice(hf_name)
            if header.get_dtype() not in (*FLOAT_TYPES, *(["I64", "I32"] if name == _ROWS_TO_TOKENS else [])):
                raise BuildError(f"{path}: tensor `{hf_name}` of type {header.get_dtype()} is not supported")
            found[name] = tuple(header.get_shape())
        if found.get(_PROJECTION) != (hidden, NUM_READS * hidden):
            raise BuildError(
                f"{self._where}: tensor `{_PROJECTION}` has shape {found.get(_PROJECTION)}, expected "
                f"{(hidden, NUM_READS * hidden)} for the model's hidden size of {hidden}"
            )
        del found[_PROJECTION]
        found |= {depth_weight(index): (hidden, hidden) for index in range(NUM_READS)}
        if fields.draft_vocab_size not in (None, self.spec.vocab_size) and not head.maps_rows:
            missing = _ROWS_TO_TOKENS if HEAD in self._places else "lm_head.weight"
            raise BuildError(f"{self._where}: tensor `{missing}` is missing")
        if found.pop(_EMBEDDING, (self.spec.vocab_size, hidden)) != (self.spec.vocab_size, hidden):
            raise BuildError(
                f"{self._where}: tensor `{_EMBEDDING}` has not the shape of the model's embedding"
            )
        rows = fields.draft_vocab_size or self.spec.vocab_size
        for name, shape in ((_ROWS_TO_TOKENS, (rows,)), (HEAD, (rows, hidden))):
            if found.pop(name, shape) != shape:
                hf_name = self._places[name][1]
                raise BuildError(f"{self._where}: `{hf_name}` has not the {rows} rows of `draft_vocab_size`")
        found |= {HEAD: (head.head_rows, hidden)} if head.head_rows is not None else {}
        found |= {HEAD_ROWS: (self.spec.vocab_size,)} if head.maps_rows else {}
        of_model = tensor_shapes(replace(self.spec, draft=None))
        check_tensors(self._where, self.spec, of_model | {f"{prefix}{n}": s for n, s in found.items()})
        if head.maps_rows:
            self._head_rows()

    def _head_rows(self) -> Array:
        """Return the row of each token [vocab], -1 for tokens that the head does not have."""
        path, hf_name = self._places[_ROWS_TO_TOKENS]
        offsets = np.asarray(self._files[path].get_tensor(hf_name), np.int64)
        token_ids = np.arange(len(offsets)) + offsets
        vocab_size = self.spec.vocab_size
        outside = token_ids.min() < 0 or token_ids.max() >= vocab_size
        if outside or len(np.unique(token_ids)) < len(token_ids):
            raise BuildError(f"{path}: `{hf_name}` does not name distinct tokens of the model's {vocab_size}")
        rows = np.full(vocab_size, -1, np.float32)
        rows[token_ids] = np.arange(len(token_ids))
        return rows

    def _check_embedding(self) -> None:
        """Raise BuildError if the head has an embedding that is not a copy of the model's."""
        if _EMBEDDING not in self._places:
            return
        own, shared = (
            np.asarray(each, np.float32)
            for each in (self._read(_EMBEDDING), self._model.tensor("token_embd.weight"))
        )
        if np.linalg.norm(own - shared) > MAX_COPY_ERROR * np.linalg.norm(shared):
            raise BuildError(
                f"{self._where}: `{_EMBEDDING}` differs from the model's embedding, which takes its place; "
                "use a head that was trained for this model"
            )


def _check_fits(where: str, spec: ModelSpec, fields: _HeadFields, config: Config) -> None:
    """Raise BuildError, naming the size, unless the head was made for a model like `spec`."""
    sizes = (
        ("`hidden_size`", config.hidden_size, spec.hidden_size),
        ("`target_hidden_size`", fields.target_hidden_size or config.hidden_size, spec.hidden_size),
        ("`vocab_size`", fields.vocab_size, spec.vocab_size),
        ("`rms_norm_eps`", config.rms_norm_eps, spec.rms_norm_eps),
    )
    for name, own, models in sizes:
        if not math.isclose(own, models, rel_tol=1e-6):  # GGUF files have f32
            raise BuildError(
                f"{where}: the head has a {name} of {own}, where {spec.name} needs {models}; "
                "use a head that was trained for this model"
            )
    if spec.logit_cap is not None:
        raise BuildError(f"{where}: a head for a model that caps its logits ({spec.name}) is not supported")
    if spec.architecture.startswith("granite"):
        raise BuildError(f"{where}: a head for a model with scaled layers ({spec.name}) is not supported")


def _depths(where: str, num_layers: int, given: list[int] | None) -> tuple[int, ...]:
    """Return the numbers of main layers after which the head reads the residual stream.

    Without `given`, the input of layers 2, n / 2 and n - 3, counted from 0, as in EAGLE's code, vLLM and
    SGLang. Files name either the layers with these inputs, or the layers with these outputs, which are one
    less; as in SGLang, a first layer 1 says the latter.
    """
    listed = given or [2, num_layers // 2, num_layers - 3]
    depths = tuple(each + (listed[0] == 1) for each in listed)
    if len(depths) != NUM_READS or not all(0 < each <= num_layers for each in depths):
        raise BuildError(
            f"{where}: the head reads the layers {', '.join(map(str, listed))}; supported are {NUM_READS} of "
            f"the model's {num_layers}"
        )
    return depths
