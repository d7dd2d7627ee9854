"""The structure of a model (ModelSpec), and the options of a build (BuildOptions).

Where features that are not implemented yet belong:
- adapters (LoRA): an additive term of Linear, and each sequence's adapter as an input of the batch;
- image embeddings: an input next to `tokens`, with which Embed replaces the embeddings of placeholder ids;
- sharded weights: an axis of a block's `ModelTensor`, and a sum over devices after the block's last Linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar

from shortfin_apps.llm.contract.config import POOLS, Pool
from shortfin_apps.llm.contract.device_names import CPU, by_kind, join_devices, kind_of, split_devices
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.eagle_head import EagleHead
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.kv_layout import KeysValues, KVLayout, KVType
from shortfin_apps.llm.model.layer_inputs import LayerInputs
from shortfin_apps.llm.model.operations import (
    CapLogits,
    Embed,
    LastTokens,
    Linear,
    ModelTensor,
    Norm,
    Operation,
)
from shortfin_apps.llm.model.rope import Rotation
from shortfin_apps.llm.model.weight_blocks import BlockType

FloatType = Literal["bf16", "f16", "f32"]
QuantBits = Literal[8, 12]  # of activations that are multiplied as integers
ActivationBits = Literal[8, 12, 16]
WeightType = Literal["bf16", "f16", "f32", "q8_0", "q4", "int8", "fp8"]
OWN_TYPES = "auto"  # the choice that keeps the source's weight types
WeightChoice = Literal["auto", WeightType]

Layer = tuple[Block, ...]  # each block adds its output to the residual stream
BlockKind = TypeVar("BlockKind", bound=Block)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder: its layers, and what they share; fields are named as in Hugging Face's `config.json`.

    Norm weights and biases are always stored in f32.
    """

    name: str
    architecture: str  # as the source names it
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[Layer, ...]
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    layer_inputs: LayerInputs | None = None
    draft: DraftLayer | EagleHead | None = None

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, and after them the draft layer, if there is one."""
        return self.layers if self.draft is None else (*self.layers, self.draft.blocks)

    @property
    def blocks(self) -> list[Block]:
        """The distinct blocks of all layers."""
        return list(dict.fromkeys(block for layer in self.all_layers for block in layer))

    def blocks_of(self, kind: type[BlockKind]) -> list[BlockKind]:
        """Return the distinct blocks of one kind."""
        return [block for block in self.blocks if isinstance(block, kind)]

    @property
    def attention(self) -> Attention:
        """The first attention block, for formats with a single head count and head size."""
        return self.blocks_of(Attention)[0]

    @property
    def keys_values(self) -> KeysValues:
        """The layout of the first layer with keys and values."""
        return next(layout for _, layout in self.kv_layouts if isinstance(layout, KeysValues))

    @property
    def experts(self) -> MoE | None:
        """The block of routed experts, equal in all layers that have one; None for a model without."""
        return next(iter(self.blocks_of(MoE)), None)

    @property
    def delta_net(self) -> DeltaNet | None:
        """The gated delta net, equal in all layers that have one; None for a model without."""
        return next(iter(self.blocks_of(DeltaNet)), None)

    @property
    def pools(self) -> dict[Pool, tuple[int, ...]]:
        """Pool -> numbers of the layers that store their tokens in its pages, in the order of POOLS.

        Layers with and without a window have separate pools: pages outside the window can only be freed if
        all layers that use them have a window.
        """
        stored = [(layout.pool, number) for number, layout in self.kv_layouts]
        pools = {pool: tuple(number for its, number in stored if its == pool) for pool in POOLS}
        return {pool: layers for pool, layers in pools.items() if layers}

    @property
    def kv_layouts(self) -> list[tuple[int, KVLayout]]:
        """(Layer number, layout) for each block that stores something in pages."""
        layouts = ((n, block.kv_layout) for n, layer in enumerate(self.all_layers) for block in layer)
        return [(number, layout) for number, layout in layouts if layout is not None]

    @property
    def rotations(self) -> list[Rotation]:
        """The distinct rotations of all blocks, sorted by the name of their rope, without rope last."""
        found = dict.fromkeys(block.rotation for block in self.blocks)
        rotations = [each for each in found if each is not None]
        return sorted(rotations, key=lambda each: (each.rope is None, each.rope.name if each.rope else ""))

    @property
    def head_weight(self) -> str:
        """The name of the output projection's weight."""
        return "token_embd.weight" if self.tie_word_embeddings else "output.weight"

    def tensors(self) -> Iterator[ModelTensor]:
        """List all tensors in the order in which an invocation reads them. Matrices are [out, in]."""
        table = "token_embd.weight"
        yield ModelTensor(table, (self.vocab_size, self.hidden_size), table)
        if self.layer_inputs:
            yield from self.layer_inputs.tensors(self.vocab_size, self.hidden_size)
        for number, layer in enumerate(self.layers):
            for block in layer:
                yield from (tensor.of_layer(number) for tensor in block.tensors(self.hidden_size))
        norm = "output_norm.weight"
        yield ModelTensor(norm, (self.hidden_size,), norm, scale=self.logit_scale)
        if not self.tie_word_embeddings:
            yield ModelTensor("output.weight", (self.vocab_size, self.hidden_size), "output.weight")
        if self.draft is not None:
            number = len(self.layers)
            yield from (tensor.of_layer(number) for tensor in self.draft.tensors(self.hidden_size))

    def operations(self) -> Iterator[Operation]:
        """List the operations from the value `tokens` [tokens] i64 to `logits` [rows, vocab] f32.

        `logits` has a row per sequence of the batch, for its last token.
        """
        yield Embed("tokens", "x", "token_embd.weight")
        if self.layer_inputs:
            yield from self.layer_inputs.operations("tokens", "x")
        for number, layer in enumerate(self.layers):
            for index, block in enumerate(layer):
                x, out = "sum" if index else "x", "x" if index == len(layer) - 1 else "sum"
                yield from block.operations(number, x, out)
            if self.draft is not None:
                yield from self.draft.read_operations(len(self.layers), number + 1, "x")
        if self.draft is not None:
            yield from self.draft.store_operations(len(self.layers), "x")
        yield LastTokens("x", "x")
        yield Norm("x", "normed", "output_norm.weight")
        yield Linear("normed", "logits", self.head_weight)
        if self.logit_cap is not None:
            yield CapLogits("logits", "logits")

    def draft_operations(self) -> Iterator[Operation]:
        """List the operations of a `draft` entry, from `tokens` to `logits`; none without a draft layer."""
        if self.draft is not None:
            yield from self.draft.operations(len(self.layers), self.head_weight)
            if self.logit_cap is not None:
                yield CapLogits("logits", "logits")

    def all_operations(self) -> list[Operation]:
        """List the operations of all entries."""
        return [*self.operations(), *self.draft_operations()]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a source must have: GGUF name -> shape."""
    return {tensor.name: tensor.shape for tensor in spec.tensors()}


def weight_parts(tensors: Iterable[ModelTensor]) -> dict[str, list[ModelTensor]]:
    """Group tensors by stored weight: weight name -> tensors stacked along rows, in order of appearance."""
    parts: dict[str, list[ModelTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.weight, []).append(tensor)
    return parts


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the stored weights in the order in which an invocation reads them: name -> shape."""
    return {name: stacked_shape(parts) for name, parts in weight_parts(spec.tensors()).items()}


def num_weights(spec: ModelSpec) -> int:
    """Return the number of elements of all stored weights."""
    return sum(map(prod, weight_shapes(spec).values()))


def stacked_shape(parts: Sequence[ModelTensor]) -> tuple[int, ...]:
    """Return the shape of the weight that the tensors are stacked into."""
    rows, last = sum(part.shape[0] for part in parts), parts[-1]
    if last.expert is None:
        return rows, *last.shape[1:]
    experts = last.expert + 1
    return experts, rows // experts, *last.shape[1:]


# Matmuls of up to 16 rows, the smallest tile, take about equally long. Entries of static size know their
# number of tokens, from which the builder selects the tiles.
_GPU_DEFAULTS: dict[str, Any] = {
    "decode_batch_sizes": (1, 8, 16, 32, 64, 128, 256),
    "extend_sizes": (64, 128, 256, 384, 512, 1024, 2048),
}
# Options without a meaning on CPUs (True) and on GPUs (False).
_OF_OTHERS: dict[bool, tuple[str, ...]] = {
    True: ("batch_invariant", "one_launch"),
    False: ("activation_bits",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `shortfin-llm build`; all are part of the artefact's identity.

    Defaults are for CPUs, where entries of static shape were no faster (docs/measurements.md); `for_device`
    has the defaults of other devices.
    `chunk_sizes`: chunk lengths in tokens with a prefill entry of static shape, `prefill_bs{N}_s{S}`, in
    addition to the dynamic `prefill_bs{N}`; `extend_sizes`: token counts with an entry `extend_t{T}`, in
    addition to the dynamic `extend`; `decode_loop_sizes`: batch sizes with an entry `decode_loop_bs{N}`
    (decodes that draw the next tokens); `top_k`: candidates per sequence of the on-device sampler.
    `activation_bits`: bits to which CPUs round activations to multiply weights in blocks. With 16, for AMX,
    activations and weights are multiplied in bf16.
    `batch_invariant`: on AMD GPUs, all entries compute the same bits for a token; on CPUs, they always do.
    `with_invariance` replaces None.
    `one_launch`: on GPUs, decodes of a few rows are one launch, if the model qualifies (docs/kernels.md).
    """

    device: str = "cpu"  # "cpu" (this host), "cpu:<llvm cpu name>", "hip:gfx942", ...
    weights: WeightType = "bf16"
    kv: KVType = "bf16"
    prefill_batch_sizes: tuple[int, ...] = (1, 2, 4)
    decode_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    chunk_sizes: tuple[int, ...] = ()
    extend_sizes: tuple[int, ...] = ()
    decode_loop_sizes: tuple[int, ...] | None = None  # None: the decode batch sizes on GPUs, empty on CPUs
    block_seq_stride: int = 16
    context_length: int | None = None  # None: the model's maximum, limited to 8192
    device_block_count: int | None = None  # pages; None: enough for 8 full contexts within 1 GiB
    top_k: int = 64
    batch_invariant: bool | None = None  # None: where it is cheap (model/config.py)
    one_launch: bool | None = None  # None: where it was measured to be faster
    draft_layer: bool = True  # False: leave the model's draft layer out
    activation_bits: ActivationBits | None = None  # None: 12
    # (name, type) of weights stored in another type than `weights`; type None: floats of `activations`' type.
    block_types: tuple[tuple[str, BlockType | None], ...] = ()

    @classmethod
    def for_device(cls, device: str, **given: Any) -> BuildOptions:
        """Create options from `given`; options that are None or missing get the device's defaults."""
        options = {} if device.startswith("cpu") else _GPU_DEFAULTS
        options = options | {name: value for name, value in given.items() if value is not None}
        return cls(device=device, **options)

    @classmethod
    def for_devices(cls, device: str, **given: Any) -> tuple[BuildOptions, ...]:
        """Create options for each kind of device in a list. Raises BuildError for an invalid list.

        In a list of CPUs and GPUs, options that only one of them has are for that one.
        """
        devices = [join_devices(each) for each in by_kind(split_devices(device))]
        are_cpus = [kind_of(each) == CPU for each in devices]
        unset = _OF_OTHERS if len(set(are_cpus)) > 1 else {True: (), False: ()}
        return tuple(
            cls.for_device(each, **given | dict.fromkeys(unset[is_cpu]))
            for each, is_cpu in zip(devices, are_cpus, strict=True)
        )

    @property
    def loop_sizes(self) -> tuple[int, ...]:
        """The batch sizes with a decode loop (a decode that draws the next tokens).

        By default only on GPUs, where host and device then work in parallel; on a CPU they share the cores.
        """
        if self.decode_loop_sizes is not None:
            return self.decode_loop_sizes
        return () if self.device.startswith("cpu") else self.decode_batch_sizes

    @property
    def stored_weights(self) -> str:
        """A description of the weights' types, for users."""
        count = len(self.block_types)
        return f"{self.weights}, {count} of them in the source's own types" if count else self.weights

    @property
    def activations(self) -> FloatType:
        """The dtype of activations.

        For quantised weights, matmuls either dequantise the weights to this dtype, or quantise activations.
        """
        match self.weights:
            case "q8_0" | "q4" | "int8" | "fp8":
                return "bf16"
            case dtype:
                return dtype

    @property
    def quantises_activations(self) -> bool:
        """Whether matmuls quantise activations, as on CPUs with integer dot products."""
        return self.device.startswith("cpu") and (self.has_blocks or self.weights == "int8")

    @property
    def block_bits(self) -> ActivationBits:
        """Bits of activations that are multiplied by weights in blocks."""
        return self.activation_bits or 12

    @property
    def stores_values(self) -> bool:
        """Whether pages have values that are a part of their keys, too, as kernels for CPUs need them."""
        return self.device.startswith("cpu")

    @property
    def has_blocks(self) -> bool:
        """Whether weights are stored in blocks."""
        return self.weights in ("q8_0", "q4") or any(block is not None for _, block in self.block_types)

    @property
    def cache_dtype(self) -> str:
        """The MLIR type of a cache element."""
        return "i8" if self.kv == "q8_0" else self.kv

    @property
    def query_dtype(self) -> FloatType:
        """The dtype of queries on GPUs: the cache's; for a q8_0 cache, the dtype it is dequantised to."""
        return self.activations if self.kv == "q8_0" else self.kv
