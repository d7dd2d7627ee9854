"""The shape of a model, and the options of a build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shortfin_apps.llm.model.delta_net import STATE_WINDOW, DeltaNet
from shortfin_apps.llm.model.experts import RoutedExperts
from shortfin_apps.llm.model.rope import RopeScaling, Rotation
from shortfin_apps.llm.model.weight_blocks import BlockType

FloatType = Literal["bf16", "f16", "f32"]
# For gate g and up u: silu(g) * u and gelu(g) * u (with gelu approximated by tanh); gpt-oss's clamped is g *
# sigmoid(1.702 g) * (u + 1), with g at most 7 and u from -7 to 7.
Activation = Literal["silu", "gelu", "clamped"]
WeightType = Literal["bf16", "f16", "f32", "q8_0", "q4", "int8", "fp8"]
KVType = Literal["bf16", "f16", "f32", "q8_0"]  # q8_0: int8 with a scale per token and head
OWN_TYPES = "auto"  # keeps the source's weight types
WeightChoice = Literal["auto", WeightType]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder and the features of its layers; names as in Hugging Face's `config.json`.

    The family (llama.py) lists its tensors, with q/k rows in the half-split rotary order: element i of a head
    rotates with element i + head_dim / 2. If only part of the head rotates, it is the first part of both
    halves. Norm weights and biases are always f32.
    """

    name: str
    architecture: str  # a key of FAMILIES (family.py), as named by the source
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the projection after attention
    rotated_dim: int | None = None  # elements of a head that rotate; None: all
    has_fused_qkv: bool = False  # q, k and v are one tensor
    has_fused_gate_up: bool = False  # gate and up are one tensor
    unrotated_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    score_scale: float = 1.0  # multiplies attention's scores, in addition to 1 / sqrt(head_dim)
    logit_scale: float = 1.0
    qk_norm: bool = False  # RMS norm of each head of q and k before rotation
    whole_qk_norm: bool = False  # RMS norm over all heads of q, and of k
    norms_before: bool = True  # norms before attention and feed-forward
    norms_after: bool = False  # norms of their results before adding them to the residual stream
    activation: Activation = "silu"  # the feed-forward's gate activation
    window: int | None = None  # number of last tokens that `windowed_layers` see
    windowed_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None  # for windowed layers, without scaling; None: same as other layers
    has_sinks: bool = False  # each head's softmax has an extra learned score with value 0
    score_cap: float | None = None  # attention's scores are cap * tanh(score / cap)
    logit_cap: float | None = None
    experts: RoutedExperts | None = None  # replaces a feed-forward for all tokens
    attention_gate: bool = False  # attention's result is multiplied by the sigmoid of gates projected with q
    delta_net: DeltaNet | None = None  # replaces attention in some layers

    @property
    def qkv_features(self) -> int:
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token of the layer sees, including itself; None: all before it."""
        return self.window if layer in self.windowed_layers else None

    def sinks_of(self, layer: int) -> str | None:
        """Return the name of the layer's attention sinks [heads] f32; None if it has none."""
        return f"blk.{layer}.attn_sinks.weight" if self.has_sinks else None

    def has_state(self, layer: int) -> bool:
        """Whether the layer is a gated delta net."""
        return self.delta_net is not None and layer in self.delta_net.layers

    @property
    def num_states(self) -> int:
        """The number of layers that are gated delta nets."""
        return 0 if self.delta_net is None else len(self.delta_net.layers)

    @property
    def slabs(self) -> tuple[tuple[int, ...], ...]:
        """The groups of layers that share pages: all layers, or layers without and with a window or a state.

        Pages outside a window can only be freed if no layer without a window stores its tokens in them.
        """
        layers = range(self.num_hidden_layers)
        short = tuple(n for n in layers if self.window_of(n) is not None or self.has_state(n))
        whole = tuple(n for n in layers if n not in short)
        return tuple(slab for slab in (whole, short) if slab)

    @property
    def last_window(self) -> int | None:
        """The number of tokens that a token sees in pages of the last slab; None if it sees all."""
        if self.delta_net is not None:
            return STATE_WINDOW
        return self.window if self.window_of(self.slabs[-1][0]) is not None else None

    def rotation_of(self, layer: int) -> Rotation:
        if layer in self.unrotated_layers:
            return Rotation.NONE
        is_local = self.local_rope_theta is not None and layer in self.windowed_layers
        return Rotation.LOCAL if is_local else Rotation.GLOBAL

    @property
    def rotations(self) -> set[Rotation]:
        """The rotations of all layers."""
        return {self.rotation_of(layer) for layer in range(self.num_hidden_layers)}

    def experts_of(self, layer: int) -> RoutedExperts | None:
        """Return the experts of a layer; None if it has one feed-forward for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def head_weight(self) -> str:
        """The name of the output projection's weight."""
        return "token_embd.weight" if self.tie_word_embeddings else "output.weight"


# Any number of rows up to 16, the smallest matmul tile, takes about as long. Entries of fixed size know their
# number of tokens, which selects the tiles.
_GPU_DEFAULTS: dict[str, Any] = {
    "decode_batch_sizes": (1, 8, 16, 32, 64, 128, 256),
    "extend_sizes": (64, 128, 256, 384, 512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `shortfin-llm build`; all are part of the artefact's identity.

    Defaults are for CPUs, where entries of static shape were no faster (docs/measurements.md). `for_device`
    has the defaults of other devices. `chunk_sizes` are the chunk lengths (tokens) with a prefill entry of
    static shape, `prefill_bs{N}_s{S}`, in addition to the dynamic `prefill_bs{N}`. `extend_sizes` are the
    token counts with an `extend_t{T}`, in addition to the dynamic `extend`. `decode_loop_sizes` are the batch
    sizes with a `decode_loop_bs{N}`, which samples on the device. `top_k` is the on-device sampler's width.
    With `batch_invariant`, every entry computes the same bits for a token on AMD GPUs; CPUs always do.
    """

    device: str = "cpu"  # "cpu" (this host), "cpu:<llvm cpu name>", "hip:gfx942", ...
    weights: WeightType = "bf16"
    kv: KVType = "bf16"
    prefill_batch_sizes: tuple[int, ...] = (1, 2, 4)
    decode_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    chunk_sizes: tuple[int, ...] = ()
    extend_sizes: tuple[int, ...] = ()
    decode_loop_sizes: tuple[int, ...] | None = None  # None: the decode batch sizes on GPUs, none on CPUs
    block_seq_stride: int = 16
    context_length: int | None = None  # None: the model's own, at most 8192
    device_block_count: int | None = None  # pages; None: enough for 8 full contexts within 1 GiB
    top_k: int = 64
    batch_invariant: bool = False
    # Weights stored in other types than `weights`; None stands for floats of the activations' type.
    block_types: tuple[tuple[str, BlockType | None], ...] = ()

    @classmethod
    def for_device(cls, device: str, **given: Any) -> BuildOptions:
        """Create options from `given`, with the device's defaults for options that are None or missing."""
        options = {} if device.startswith("cpu") else _GPU_DEFAULTS
        options = options | {name: value for name, value in given.items() if value is not None}
        return cls(device=device, **options)

    @property
    def loop_sizes(self) -> tuple[int, ...]:
        """The batch sizes with a decode loop.

        On GPUs, decode loops keep host and device busy; on a CPU, both use the same cores.
        """
        if self.decode_loop_sizes is not None:
            return self.decode_loop_sizes
        return () if self.device.startswith("cpu") else self.decode_batch_sizes

    @property
    def stored_weights(self) -> str:
        """The types of the weights, for users."""
        count = len(self.block_types)
        return f"{self.weights}, {count} of them in the source's own types" if count else self.weights

    @property
    def activations(self) -> FloatType:
        """The dtype of activations; matmuls widen blocks to it, or quantise it (blocks, int8 and fp8)."""
        match self.weights:
            case "q8_0" | "q4" | "int8" | "fp8":
                return "bf16"
            case dtype:
                return dtype

    @property
    def quantises_activations(self) -> bool:
        """Whether activations are rounded to 8 bits, on CPUs with integer dot products."""
        in_blocks = any(block is not None for _, block in self.block_types)
        return self.device.startswith("cpu") and (in_blocks or self.weights in ("q8_0", "q4", "int8"))

    @property
    def cache_dtype(self) -> str:
        """The MLIR type of an element of the cache."""
        return "i8" if self.kv == "q8_0" else self.kv

    @property
    def query_dtype(self) -> FloatType:
        """The dtype of queries that read the cache on GPUs: its own, or the type its bytes are widened to."""
        return self.activations if self.kv == "q8_0" else self.kv
