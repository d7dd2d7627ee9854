"""`ModelSource`: the interface of all sources of weights, and checks that several sources use."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.families import FAMILIES, OF_ARCHITECTURE, OF_MODEL_TYPE
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.spec import ModelSpec, WeightType, tensor_shapes
from shortfin_apps.llm.model.weight_blocks import E2M1, MXFP4, Blocks, BlockType, Terms

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # as GGUF and safetensors name them
SUPPORTED = ", ".join(family.title for family in FAMILIES)  # for users

Array = npt.NDArray[Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The content of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    `tokenizer`: a JSON string; `config`: `bos_token`, `eos_token`, `pad_token`, `unk_token`, `add_bos_token`
    and `chat_template`, each only if the source has it; `generation`: `eos_token_id` (always a list) and
    sampling defaults.
    """

    tokenizer: str
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def templates(template: object, named: Mapping[str, str]) -> object:
    """Return the `chat_template` of `tokenizer_config.json` with named templates appended.

    If a name occurs twice in the result, the last template of that name is used.
    """
    if not named:
        return template
    default = [{"name": "default", "template": template}] if isinstance(template, str) else []
    listed = template if isinstance(template, list) else default
    return [*listed, *({"name": name, "template": text} for name, text in named.items())]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a source's weights.

    `name`: the source's name of the quantisation; `weights`: the closest type that `build --weights` offers;
    `kept`: whether building can keep the source's quants; `bits`: bits a weight in the source, with scales,
    if the quants are stored in more.
    """

    name: str
    weights: WeightType
    kept: bool
    bits: float | None = None

    def __str__(self) -> str:
        if self.bits is None:
            return self.name
        stored = "kept" if self.kept else "rounded"
        return f"{self.name} ({self.bits:.1f} bits a weight, {stored} in {4 if self.weights == 'q4' else 8})"


class ModelSource(ABC):
    """A model to build from; `sha256` is the hash of all files that are read."""

    spec: ModelSpec
    sha256: str

    @property
    def quantisation(self) -> Quantisation | None:
        """The quantisation of most weights; None if they are floats."""
        return None

    @property
    def left_out(self) -> str | None:
        """A description, for users, of the parts of the source that are not built; None if there are none."""
        return None

    @abstractmethod
    def tensor(self, name: str) -> Array:
        """Read the tensor `name` of `tensor_shapes(spec)`; the result has any float dtype.

        Rows of q and k are in the order that Attention defines. Raises BuildError.
        """

    def blocks(self, name: str) -> Blocks | None:
        """Return the tensor's quantised blocks, rows in the order of `tensor`; None if no block type fits."""
        return None

    def block_type(self, name: str) -> BlockType | None:
        """Return the tensor's block type; None for floats.

        For a quantised type without a block type, this is the nearest block type, and `blocks` returns None.
        """
        return None

    @abstractmethod
    def tokenizer_files(self) -> TokenizerFiles:
        """Return the tokenizer's files. Raises BuildError if the tokenizer is missing or unsupported."""


def row_order(spec: ModelSpec, name: str) -> npt.NDArray[np.intp] | None:
    """Return, for each row of tensor `name`, its row index in the file; None if the order is the same.

    The order differs where only some elements of a head rotate (in a file, they come first), where pairs of
    elements that rotate together are adjacent, where q has gates, and where a gated delta net has fused
    projections (in a file, they are grouped by key head).
    """
    if not name.startswith("blk."):
        return None
    for block in spec.all_layers[int(name.split(".")[1])]:
        if isinstance(block, DeltaNet):
            return delta_row_order(block, name)
        if isinstance(block, Attention):
            return _attention_row_order(block, name)
        if isinstance(block, LatentAttention):
            return _latent_row_order(block, name)
    return None


def _attention_row_order(block: Attention, name: str) -> npt.NDArray[np.intp] | None:
    if block.gate and name.endswith(".attn_q.weight"):
        return _ungated_row_order(block)
    normed = (block.heads, block.kv_heads) if block.whole_qk_norm else (1, 1)  # heads in the norms' weights
    heads, others = {
        "attn_q": (block.heads, 0),
        "attn_k": (block.kv_heads, 0),
        "attn_qkv": (block.heads + block.kv_heads, block.kv_features),
        "attn_q_norm": (normed[0], 0),
        "attn_k_norm": (normed[1], 0),
    }.get(name.split(".")[-2], (0, 0))
    if block.rope is None or block.rope.dim is None or not heads:
        return None
    turned = heads * block.head_dim
    order = np.arange(turned + others)
    order[:turned] = (np.arange(heads)[:, None] * block.head_dim + _head_row_order(block)).reshape(-1)
    return order


def _latent_row_order(block: LatentAttention, name: str) -> npt.NDArray[np.intp] | None:
    heads, before = {
        "attn_q": (block.heads, block.plain),
        "attn_q_b": (block.heads, block.plain),
        "attn_kv_a_mqa": (1, block.rank),
    }.get(name.split(".")[-2], (0, 0))
    if not block.in_pairs or not heads:
        return None
    rows = np.arange(heads * (before + block.rotated)).reshape(heads, -1)
    return np.concatenate([rows[:, :before], rows[:, before::2], rows[:, before + 1 :: 2]], axis=1).reshape(
        -1
    )


def _head_row_order(block: Attention) -> npt.NDArray[np.intp]:
    """Return, for each row of a head of q or k, its row index in the file's head."""
    if block.rope is None or block.rope.dim is None:
        return np.arange(block.head_dim)
    half, kept = block.rope.dim // 2, (block.head_dim - block.rope.dim) // 2
    halves = np.split(np.arange(block.head_dim), [half, 2 * half, 2 * half + kept])
    return np.concatenate([halves[0], halves[2], halves[1], halves[3]])


def _ungated_row_order(block: Attention) -> npt.NDArray[np.intp]:
    """Return, for each row of q and its gates, its row index in the file.

    In a file, each head of q is followed by its gates. In the result, all heads come before all gates.
    """
    heads = np.arange(2 * block.q_features).reshape(block.heads, 2, block.head_dim)
    return np.concatenate([heads[:, 0, _head_row_order(block)].reshape(-1), heads[:, 1].reshape(-1)])


def delta_row_order(net: DeltaNet, name: str) -> npt.NDArray[np.intp] | None:
    """Return, for each row of a fused tensor, its row index in the source; None for other tensors.

    The source groups rows by key head, the result by projection.
    """
    sharing = net.value_heads // net.key_heads
    if name.endswith(".ssm_in.weight"):  # q, k, v and gates
        values = sharing * net.value_dim
        return _by_part(net.key_heads, (net.key_dim, net.key_dim, values, values))
    return _by_part(net.key_heads, (sharing, sharing)) if name.endswith(".ssm_ba.weight") else None


def _by_part(heads: int, sizes: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """Return row indices grouped by part, for rows that are grouped by head.

    Each of the `heads` heads consists of parts of the given `sizes`.
    """
    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def check_spec(where: str, spec: ModelSpec) -> None:
    """Raise BuildError for inconsistent sizes and unsupported layers; `where` names the source."""
    for block in spec.blocks:
        match block:
            case Attention():
                _check_attention(where, block)
            case LatentAttention():
                _check_latent(where, block)
            case MoE(count=count, per_token=per_token) if not 0 < per_token <= count:
                raise BuildError(f"{where}: a token cannot have {per_token} of {count} experts")
            case DeltaNet(value_heads=heads, key_heads=key_heads) if heads % key_heads:
                raise BuildError(f"{where}: {heads} value heads do not divide among {key_heads} key heads")
    if "state" in spec.pools and "window" in spec.pools:
        raise unsupported(where, "a model with windows and states")
    if "state" in spec.pools and "whole" not in spec.pools:
        raise unsupported(where, "a model with gated delta nets and no attention, or none of these")


def _check_attention(where: str, block: Attention) -> None:
    if block.heads % block.kv_heads:
        raise BuildError(
            f"{where}: {block.heads} attention heads do not divide among {block.kv_heads} key/value heads"
        )
    if block.head_dim < 2 or block.head_dim % 2:
        raise BuildError(f"{where}: head dimension {block.head_dim} is not even, so it cannot be rotated")
    if block.rope is None:
        return
    dim, theta = block.rope.dim, block.rope.theta
    if dim is not None and (dim % 2 or not 0 < dim < block.head_dim):
        raise BuildError(f"{where}: {dim} elements of a head of {block.head_dim} cannot be rotated")
    if theta <= 1:
        raise BuildError(f"{where}: a rotary base of {theta} makes no wavelengths; it must exceed 1")


def _check_latent(where: str, block: LatentAttention) -> None:
    if block.rotated % 2:
        raise BuildError(f"{where}: {block.rotated} elements of a head cannot be rotated in pairs")
    if block.rope.dim is not None:
        raise unsupported(where, "a rotation of a part of the rotated elements (`partial_rotary_factor`)")
    if block.rope.theta <= 1:
        raise BuildError(
            f"{where}: a rotary base of {block.rope.theta} makes no wavelengths; it must exceed 1"
        )


def check_tensors(where: str, spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BuildError unless `found` (tensor name -> shape) equals `tensor_shapes(spec)`."""
    layers = len(spec.layers)
    experts = sum(block.count for layer in spec.layers for block in layer if isinstance(block, MoE))
    if layers + experts > len(found):  # checked before generating that many tensor names
        more = f" and {experts} experts" if experts else ""
        raise BuildError(f"{where}: {len(found)} tensors are too few for {layers} layers{more}")
    expected = tensor_shapes(spec)
    if missing := sorted(expected.keys() - found.keys()):
        raise BuildError(f"{where}: tensor `{missing[0]}` is missing")
    if unknown := sorted(found.keys() - expected.keys()):
        raise BuildError(
            f"{where}: tensor `{unknown[0]}` belongs to no model that is supported; supported are "
            f"{supported_models()}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise BuildError(f"{where}: tensor `{name}` has shape {found[name]}, expected {shape}")


def supported_models() -> str:
    """Return the list of supported models, as the end of an error message."""
    wholes = {family.part_of for family in FAMILIES if family.part_of}
    names = " or ".join(f"`{name}`" for name in sorted({*OF_MODEL_TYPE, *wholes, *OF_ARCHITECTURE}))
    return f"{SUPPORTED} (`model_type` or GGUF architecture {names})"


def unsupported(where: str, what: str) -> BuildError:
    """Return the error for an unsupported model; `what` names the unsupported feature."""
    return BuildError(f"{where}: {what} is not supported; supported are {supported_models()}")


def parse(where: str, kind: type[Model], raw: object, names: Mapping[str, str] | None = None) -> Model:
    """Validate `raw` with the pydantic model `kind`. Raises BuildError naming the first invalid field.

    `names`: field of the model -> its name in the file, where they differ.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        first, *others = (str(part) for part in problem["loc"]) if problem["loc"] else ("the whole",)
        name = ".".join([(names or {}).get(first, first), *others])
        raise BuildError(f"{where}: `{name}`: {problem['msg']}") from None


@contextmanager
def computing_spec(where: str) -> Iterator[None]:
    """Context that converts errors of computing a spec, such as a division by 0, into BuildError.

    `where` names the file with the invalid values.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise BuildError(f"{where} has numbers that no model has ({error})") from error


def sha256_of(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of one file's content, or of the names and contents of several files."""
    files = list(paths)
    digests = [(path.name, _sha256(path)) for path in files]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BuildError(f"{path}: cannot be read ({error.strerror})") from error


def as_float(where: str, array: Array) -> Array:
    """Return `array`. Raises BuildError if it contains NaN or infinity."""
    if not np.isfinite(array).all():
        raise BuildError(f"{where} contains NaN or infinite values; the file is damaged")
    return array


def mxfp4_blocks(quants: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Blocks:
    """Create blocks from 4-bit `quants` [rows, blocks, 32] and `scales` [rows, blocks].

    A block of MXFP4 (OCP Microscaling Formats, version 1.0) has 32 4-bit floats (e2m1) and a power-of-two
    scale (e8m0). Scales are converted to f16, which represents 2^-24 to 2^15. Smaller scales, where all
    weights are below 1e-6, are rounded. Larger scales become infinite; callers must reject them.
    """
    half_exponent = 128  # e8m0's bias of 127, plus 1 to halve the scale, as E2M1 has doubled values
    with np.errstate(over="ignore"):
        narrow = np.exp2(scales.astype(np.float32) - half_exponent).astype(np.float16)
    return Blocks(MXFP4, E2M1[quants].reshape(len(quants), -1), Terms(narrow))
