"""Source: a model in a GGUF file, or in the parts of one, quantised or not.

The format is llama.cpp's (docs/gguf.md). For some architectures, its converter interleaves the rows of q and
k for its rotary embedding; this module restores the half-split order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize
from gguf.gguf_reader import ReaderField
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from shortfin_apps.llm.builder.sources.base import (
    Array,
    LayerCount,
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
    unsupported,
)
from shortfin_apps.llm.builder.sources.gguf_blocks import (
    block_type_of,
    each_matrix,
    quantisation_of,
    read_blocks,
)
from shortfin_apps.llm.builder.sources.gguf_families import GGUF_FAMILIES, GgufFamily
from shortfin_apps.llm.builder.sources.gguf_header import parts_of
from shortfin_apps.llm.builder.sources.gguf_rope import FACTORS, ROPE_FACTORS, GgufRope, llama3_scaling
from shortfin_apps.llm.builder.sources.gguf_tokenizer import (
    GgufVocabulary,
    rebuild_tokenizer,
    sampling_defaults,
)
from shortfin_apps.llm.builder.sources.known_fields import GGUF_FILE, GGUF_MODEL, GGUF_TOKENIZER
from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    check_at_most,
)
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import whole_stem
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.granite import Multipliers
from shortfin_apps.llm.model.rope import Rope, RopeScaling
from shortfin_apps.llm.model.spec import Layer, ModelSpec
from shortfin_apps.llm.model.weight_blocks import Blocks, BlockType

_SHARED_GATE = ".ffn_gate_inp_shexp.weight"


class _Hyperparameters(BaseModel):
    """The sizes of a model: the keys below the architecture's name."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    block_count: LayerCount
    context_length: PositiveInt
    embedding_length: PositiveInt
    feed_forward_length: NonNegativeInt = 0  # of dense layers; mixtures without dense layers may lack it
    head_count: PositiveInt = Field(alias="attention.head_count")
    head_count_kv: PositiveInt | None = Field(None, alias="attention.head_count_kv")
    rms_epsilon: PositiveFloat = Field(alias="attention.layer_norm_rms_epsilon")
    key_length: PositiveInt | None = Field(None, alias="attention.key_length")
    value_length: PositiveInt | None = Field(None, alias="attention.value_length")
    sliding_window: PositiveInt | None = Field(None, alias="attention.sliding_window")
    rope_dimensions: PositiveInt | None = Field(None, alias="rope.dimension_count")
    rope_theta: PositiveFloat = Field(10000.0, alias="rope.freq_base")
    local_rope_theta: PositiveFloat | None = Field(None, alias="rope.freq_base_swa")
    window_interval: PositiveInt | None = Field(None, alias="attention.sliding_window_pattern")
    score_cap: NonNegativeFloat = Field(0.0, alias="attn_logit_softcapping")
    logit_cap: NonNegativeFloat = Field(0.0, alias="final_logit_softcapping")
    rope_finetuned: bool = Field(True, alias="rope.scaling.finetuned")
    embedding_scale: NonNegativeFloat = 1.0
    residual_scale: NonNegativeFloat = 1.0
    attention_scale: NonNegativeFloat = Field(0.0, alias="attention.scale")
    logit_scale: NonNegativeFloat = 1.0
    expert_count: NonNegativeInt = 0
    expert_used_count: NonNegativeInt = 0
    expert_feed_forward_length: NonNegativeInt = 0
    shared_feed_forward_length: NonNegativeInt = Field(0, alias="expert_shared_feed_forward_length")
    draft_layers: NonNegativeInt = Field(0, alias="nextn_predict_layers")  # the last of the blocks
    attention_interval: PositiveInt = Field(4, alias="full_attention_interval")
    conv_kernel: PositiveInt = Field(4, alias="ssm.conv_kernel")
    key_dim: PositiveInt = Field(128, alias="ssm.state_size")
    key_heads: PositiveInt = Field(16, alias="ssm.group_count")
    value_heads: PositiveInt = Field(32, alias="ssm.time_step_rank")
    value_features: PositiveInt = Field(4096, alias="ssm.inner_size")

    @property
    def num_layers(self) -> int:
        """The number of layers without a draft model's, which are not computed."""
        return self.block_count - self.draft_layers

    @property
    def head_dim(self) -> int:
        return self.key_length or self.embedding_length // self.head_count

    def attention(
        self, family: GgufFamily, layer: int, rope: Rope, has_biases: tuple[bool, bool]
    ) -> Attention:
        """Return the block; `has_biases` are of q, k and v, and of the output."""
        is_windowed = layer in self.windowed_layers(family)
        local_theta = self.local_rope_theta or family.local_rope_theta
        if is_windowed and local_theta is not None:
            rope = Rope(theta=local_theta, dim=rope.dim, name="local")
        return Attention(
            heads=self.head_count,
            kv_heads=self.head_count_kv or self.head_count,
            head_dim=self.head_dim,
            rope=None if layer in family.unrotated_layers(self.block_count) else rope,
            window=self.sliding_window if is_windowed else None,
            sinks=family.has_sinks,
            cap=self.score_cap or None,
            qk_norm=family.qk_norm,
            whole_qk_norm=family.whole_qk_norm,
            bias=family.qkv_bias or has_biases[0],
            output_bias=has_biases[1],
            gate=family.has_delta_nets,
            norm_before=family.norms_before,
            norm_after=family.norms_after,
            fused_qkv=family.has_fused_tensors,
        )

    def feed_forward(self, family: GgufFamily) -> MLP | MoE:
        """Return the block; a missing size of the shared expert is a feed-forward's, as in llama.cpp."""
        if not family.has_experts or not self.expert_count:
            return MLP(
                features=self.feed_forward_length or self.expert_feed_forward_length,
                activation=family.activation,
                norm_before=family.norms_before,
                norm_after=family.norms_after,
                fused_gate_up=family.has_fused_tensors,
            )
        shared = self.shared_feed_forward_length or self.feed_forward_length
        return MoE(
            count=self.expert_count,
            per_token=self.expert_used_count,
            features=self.expert_feed_forward_length or self.feed_forward_length,
            activation=family.activation,
            biases=family.has_expert_biases,
            shared=shared if family.has_shared_expert else None,
        )

    def has_state(self, family: GgufFamily, layer: int) -> bool:
        return family.has_delta_nets and (layer + 1) % self.attention_interval != 0

    def delta_net(self, family: GgufFamily) -> DeltaNet:
        return DeltaNet(
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_features // self.value_heads,
            taps=self.conv_kernel,
            tiled=family.tiles_value_heads,
            fused_rates=family.has_fused_rates,
        )

    def multipliers(self, family: GgufFamily) -> Multipliers:
        """Return the multipliers; 0 stands for none, as in llama.cpp."""
        width = self.embedding_length
        scores = family.score_scale(self.block_count, width, self.head_count)
        return Multipliers(
            embedding=width**0.5 if family.scales_embedding else self.embedding_scale or 1.0,
            residual=self.residual_scale or 1.0,
            attention=self.attention_scale or scores,
            logits=self.logit_scale or 1.0,
        )

    def windowed_layers(self, family: GgufFamily) -> tuple[int, ...]:
        if self.sliding_window is None:
            return ()
        return family.windowed_layers(self.block_count, self.window_interval)

    @property
    def rotated_dim(self) -> int:
        """The number of elements of a head that rotate."""
        return self.rope_dimensions or self.head_dim


class _CheckedReader(GGUFReader):
    """A reader that raises on reads past the end and on oversized metadata.

    The library would return empty arrays or loop over a huge count. It creates an array for each item, so
    metadata is limited by MAX_ITEMS and similar constants.
    """

    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._num_items = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> Array:
        if isinstance(self.data, np.memmap):
            # Slicing a memmap is several times slower than slicing a plain array over its memory.
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        if offset + int(count) * np.dtype(dtype).itemsize > self.data.nbytes:
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[Array, Array]:
        check_at_most(
            self._where, "a text has {} bytes", int(self._get(offset, np.uint64)[0]), MAX_TEXT_BYTES
        )
        return super()._get_str(offset)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Array], list[int], list[Any]]:
        if raw_type == GGUFValueType.ARRAY:
            self._num_items += int(self._get(orig_offs + np.dtype(np.uint32).itemsize, np.uint64)[0])
            check_at_most(self._where, "its arrays have {} items", self._num_items, MAX_ITEMS)
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        check_at_most(self._where, "it has {} keys", int(count), MAX_KEYS)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        check_at_most(self._where, "it has {} tensors", int(count), MAX_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        num_bytes = int(self._get(orig_offs, np.uint64)[0])
        check_at_most(self._where, "a tensor's name has {} bytes", num_bytes, MAX_NAME_CHARS)
        num_dims = int(self._get(orig_offs + np.dtype(np.uint64).itemsize + num_bytes, np.uint32)[0])
        check_at_most(self._where, "a tensor has {} dimensions", num_dims, MAX_DIMENSIONS)
        return super()._get_tensor_info_field(orig_offs)


class GgufSource(ModelSource):
    """A GGUF file, or the file that `path` is a part of.

    Raises BuildError if it is damaged, lacks a part or is of an unsupported family. `sampling` are defaults
    for `generation_config.json`; `accepted` are unknown keys to ignore.
    """

    def __init__(
        self, path: Path, sampling: Mapping[str, float] | None = None, accepted: Collection[str] = ()
    ) -> None:
        self._where = str(path)
        self._accepted = accepted
        self._sampling = sampling or {}
        paths = parts_of(path)
        self.sha256 = sha256_of(paths)
        readers = [_read(part) for part in paths]
        self._metadata = _metadata(self._where, readers[0])
        self._architecture = self._read_architecture()
        self._family = GGUF_FAMILIES[self._architecture]
        _check_parts(paths, readers)
        stored = (tensor for reader in readers for tensor in reader.tensors)
        tensors = each_matrix(self._where, stored) if self._family.has_experts else stored
        self._tensors = {self._own_name(tensor.name): tensor for tensor in tensors}
        with computing_spec(self._where):
            self.spec = self._read_spec(whole_stem(path.stem))
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        drafts = tuple(f"blk.{n}." for n in range(len(self.spec.layers), self._num_blocks))
        shapes = {n: s for n, s in shapes.items() if n not in FACTORS and not n.startswith(drafts)}
        check_tensors(self._where, self.spec, shapes)

    @property
    def quantisation(self) -> Quantisation | None:
        return quantisation_of(self._tensors.values())

    def tensor(self, name: str) -> Array:
        array = self._dequantised(name)
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

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Return the file's row index of each row of `tensor`; None if the order is the same."""
        if not GGUF_FAMILIES[self.spec.architecture].has_pairs:
            return row_order(self.spec, name)
        attention = self.spec.attention
        if name.endswith((".attn_q.weight", ".attn_q.bias")):
            return _half_split(attention.heads, attention.head_dim)
        if name.endswith((".attn_k.weight", ".attn_k.bias")):
            return _half_split(attention.kv_heads, attention.head_dim)
        return None

    def tokenizer_files(self) -> TokenizerFiles:
        vocabulary = parse(self._where, GgufVocabulary, self._keys("tokenizer."))
        files = rebuild_tokenizer(self._where, vocabulary)
        sampling = sampling_defaults(self._keys("general.sampling."))
        return replace(files, generation={**files.generation, **sampling, **self._sampling})

    def _read_architecture(self) -> str:
        architecture = self._metadata.get("general.architecture")
        if architecture not in GGUF_FAMILIES:
            raise unsupported(self._where, f"architecture `{architecture}`")
        assert isinstance(architecture, str)
        return architecture

    def _own_name(self, name: str) -> str:
        """Return the name in the family's table for the file's tensor `name`."""
        *block, kind, suffix = name.split(".") if name.count(".") > 1 else [name, ""]
        renamed = self._family.renamed.get(kind)
        return ".".join([*block, renamed, suffix]) if renamed else name

    def _read_spec(self, stem: str) -> ModelSpec:
        architecture = self._architecture
        family, keys = self._family, self._keys(f"{architecture}.")
        found = parse(self._where, _Hyperparameters, keys)
        self._num_blocks = found.block_count
        self._check_family(found, family)
        self._check_keys(f"{architecture}.", family)
        if "token_embd.weight" not in self._tensors:
            raise BuildError(f"{self._where}: tensor `token_embd.weight` is missing")
        spec = ModelSpec(
            name=model_name(stem),
            architecture=architecture,
            vocab_size=_shape(self._tensors["token_embd.weight"])[0],
            hidden_size=found.embedding_length,
            max_position_embeddings=found.context_length,
            rms_norm_eps=found.rms_epsilon,
            layers=self._layers(found, family, self._rope_scaling(found, keys)),
            tie_word_embeddings="output.weight" not in self._tensors,
            logit_cap=found.logit_cap or None,
        )
        check_spec(self._where, spec)
        return found.multipliers(family).applied(spec)

    def _layers(
        self, found: _Hyperparameters, family: GgufFamily, scaling: RopeScaling | None
    ) -> tuple[Layer, ...]:
        dim = None if found.rotated_dim == found.head_dim else found.rotated_dim
        rope = Rope(theta=found.rope_theta, scaling=scaling, dim=dim)
        has_biases = "blk.0.attn_q.bias" in self._tensors, "blk.0.attn_output.bias" in self._tensors
        feed_forward = found.feed_forward(family)

        def mixer(layer: int) -> Attention | DeltaNet:
            if found.has_state(family, layer):
                return found.delta_net(family)
            return found.attention(family, layer, rope, has_biases)

        return tuple((mixer(layer), feed_forward) for layer in range(found.num_layers))

    def _keys(self, prefix: str) -> dict[str, Any]:
        """Return the metadata keys that start with `prefix`, without it."""
        return {k.removeprefix(prefix): v for k, v in self._metadata.items() if k.startswith(prefix)}

    def _check_keys(self, architecture: str, family: GgufFamily) -> None:
        """Raise BuildError for a key that would change the computation."""
        read_elsewhere = {k: v for k, v in self._metadata.items() if k in GGUF_FILE.neutral}
        GGUF_FILE.check(self._where, read_elsewhere)
        for prefix, known in ((architecture, GGUF_MODEL.using(family.keys)), ("tokenizer.", GGUF_TOKENIZER)):
            known.check(self._where, self._keys(prefix), self._accepted, prefix)

    def _check_family(self, found: _Hyperparameters, family: GgufFamily) -> None:
        if found.draft_layers >= found.block_count:
            raise unsupported(self._where, "a draft model alone")
        if not found.feed_forward_length and not found.expert_feed_forward_length:
            raise BuildError(f"{self._where}: key `{self._architecture}.feed_forward_length` is missing")
        if found.expert_count > 0 and not family.has_experts:
            raise unsupported(self._where, "a mixture of experts")
        if family.finetuned_rotates and not found.rope_finetuned:
            raise unsupported(self._where, "a model without rotation")
        if family.has_pairs and found.rotated_dim != found.head_dim:
            raise unsupported(self._where, "a rotary embedding of a part of the head")
        if (found.value_length or found.head_dim) != found.head_dim:
            raise unsupported(self._where, "a value head that differs from the key head")

    def _rope_scaling(self, found: _Hyperparameters, keys: dict[str, Any]) -> RopeScaling | None:
        factors = {name: self._dequantised(name) for name in FACTORS if name in self._tensors}
        if odd := next((n for n, f in factors.items() if f.shape != (found.rotated_dim // 2,)), None):
            raise unsupported(self._where, f"a `{odd}` of shape {factors[odd].shape}")
        rope = parse(self._where, GgufRope, keys)
        scaling = rope.scaling(self._where, factors, self._family.yarn_truncates)
        if ROPE_FACTORS not in factors:
            return scaling
        if scaling is not None:
            raise unsupported(self._where, f"a rotary scaling in addition to `{ROPE_FACTORS}`")
        return llama3_scaling(
            self._where, factors[ROPE_FACTORS].astype(np.float64), found.head_dim, found.rope_theta
        )

    def _dequantised(self, name: str) -> Array:
        tensor = self._tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        except (NotImplementedError, ValueError) as error:
            raise BuildError(f"{self._where}: tensor `{name}` cannot be dequantised ({error})") from error
        return as_float(f"{self._where}: tensor `{name}`", array)


def _read(path: Path) -> GGUFReader:
    try:
        with np.errstate(all="ignore"):
            return _CheckedReader(path)
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except BuildError:
        raise
    except Exception as error:  # the reader does not validate, so a damaged file can raise anything
        raise BuildError(f"{path}: not a readable GGUF file ({error})") from error


def _check_parts(paths: list[Path], readers: list[GGUFReader]) -> None:
    """Raise BuildError if a file's metadata contradicts the part number in its name."""
    for number, (path, reader) in enumerate(zip(paths, readers, strict=True)):
        keys = {"split.no": 0, "split.count": 1} | _metadata(str(path), reader)
        for key in ("split.no", "split.count"):
            if type(keys[key]) is not int:
                raise BuildError(f"{path}: `{key}` is not a whole number; download the model again")
        found = keys["split.no"], max(1, keys["split.count"])
        if found != (number, len(paths)):
            named = f"{number + 1} of {len(paths)}"
            raise BuildError(f"{path}: is part {found[0] + 1} of {found[1]}, not {named} as in its name")


def _metadata(where: str, reader: GGUFReader) -> dict[str, Any]:
    try:
        return {key: value.contents() for key, value in reader.fields.items()}
    except Exception as error:  # as above
        raise BuildError(f"{where}: not a readable GGUF file ({error})") from error


def model_name(stem: str) -> str:
    """Return the file's name without its quantisation suffix; `general.name` inside is often meaningless."""
    return re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", stem, flags=re.IGNORECASE)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Return the tensor's shape, with the gate of a shared expert as a matrix; files store a vector."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return (1, *shape) if tensor.name.endswith(_SHARED_GATE) and len(shape) == 1 else shape


def _half_split(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Reorder rows from `[heads, head_dim / 2, 2]` (llama.cpp's pairs) to `[heads, 2, head_dim / 2]`."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
