"""`Config`, the model configuration that all families read, and `Family`, what each of them defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from shortfin_apps.llm.model.attention import Attention, QueryScaling
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.layer_inputs import LayerInputs
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import Layer, ModelSpec

MAX_LAYERS = 4096
# Limited, as lists with an item per layer are created before the file's tensors are checked.
LayerCount = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
# Limited, as JSON integers can have any length. Within the limit, they can be converted to floats and
# printed.
Size = Annotated[int, Field(gt=0, lt=1 << 63)]

# `hidden_act` in `config.json` -> the activation of gated feed-forwards.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}

# The fields of Config that readers of files compute; they are not fields of `config.json`.
SET_BY_READER = frozenset(
    {"in_gguf", "activation", "output_bias", "rotated_dim", "rope", "local_rope", "query_scaling"}
)


class LayerFields(BaseModel):
    """The fields of one layer in `per_layer_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class Config(BaseModel):
    """The configuration of a model; fields are named as in Hugging Face's `config.json`.

    The keys of GGUF files are renamed to these names. A field listed in `Family.fields` is accepted only for
    the families that list it, other fields for all families.
    """

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    in_gguf: bool = False
    activation: Activation = "silu"
    output_bias: bool = False  # bias of attention's output projection; `attention_bias`: of q, k and v
    rotated_dim: Size | None = None  # elements of a head that rotate; None: all
    rope: Rope = Rope()
    local_rope: Rope = Rope()  # of layers with a window
    query_scaling: QueryScaling | None = None

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    mlp_bias: bool = False
    num_hidden_layers: LayerCount
    max_position_embeddings: Size
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool | None = None
    embedding_multiplier: PositiveFloat | None = None
    residual_multiplier: PositiveFloat | None = None
    logits_scaling: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None

    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    global_head_dim: Size | None = None  # `head_dim` of layers without a window
    num_global_key_value_heads: Size | None = None  # `num_key_value_heads` of layers without a window
    per_layer_config: dict[NonNegativeInt, LayerFields] | None = None  # newer form of both
    attention_k_eq_v: bool = False
    attention_bias: bool = False
    attention_multiplier: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    attn_output_gate: bool = True
    use_qk_norm: bool = False
    query_pre_attn_scalar: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    llama_4_scaling_beta: NonNegativeFloat | None = None  # `config.json` has it in `rope_parameters`
    mscale_all_dim: NonNegativeFloat | None = None  # likewise
    position_embedding_type: str = "rope"
    no_rope_layers: list[bool] | None = None
    no_rope_layer_interval: Size | None = None
    layer_types: list[str] | None = None
    num_kv_shared_layers: NonNegativeInt = 0  # the last layers, which read keys and values of earlier ones
    use_double_wide_mlp: bool = False  # in these layers
    hidden_size_per_layer_input: NonNegativeInt = 0
    vocab_size_per_layer_input: Size | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: Size | None = None
    max_window_layers: NonNegativeInt | None = None

    num_experts: NonNegativeInt | None = None
    num_local_experts: NonNegativeInt | None = None  # an alias of `num_experts`
    num_experts_per_tok: NonNegativeInt = 0
    top_k_experts: NonNegativeInt | None = None  # Gemma 4's name of `num_experts_per_tok`
    enable_moe_block: bool = False
    moe_intermediate_size: Size | None = None  # None: `intermediate_size`
    shared_expert_intermediate_size: Size | None = None
    shared_intermediate_size: Size | None = None  # of the feed-forward next to the experts
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None

    kv_lora_rank: Size = 512  # of latent attention
    q_lora_rank: Size | None = None  # None: q has no compressed form
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    rope_interleave: bool = True

    n_routed_experts: NonNegativeInt | None = None  # an alias of `num_experts`
    n_shared_experts: NonNegativeInt | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_scaling_factor: PositiveFloat = 1.0
    first_k_dense_replace: NonNegativeInt = 0
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None

    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    mtp_num_hidden_layers: NonNegativeInt | None = None  # draft layers

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def full_head_size(self) -> int:
        """The size of heads in layers without a window."""
        return self.global_head_dim or self.head_size

    @property
    def layer_inputs(self) -> LayerInputs | None:
        features = self.hidden_size_per_layer_input
        return LayerInputs(layers=self.num_hidden_layers, features=features) if features else None

    @property
    def expert_count(self) -> int:
        counts = (self.num_experts, self.num_local_experts, self.n_routed_experts)
        return next((count for count in counts if count is not None), 0)

    @property
    def window_size(self) -> int | None:
        """Tokens that a layer with sliding attention attends to; None if the model has no such layers."""
        return self.sliding_window if self.use_sliding_window else None

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that the layer attends to; None for all.

        Layers with a window are those listed in `layer_types`; without it, all but the last of every
        `sliding_window_pattern` layers; without either, those from `max_window_layers` (default 0) on.
        """
        if self.layer_types:
            has_window = self.layer_types[layer] == "sliding_attention"
        elif self.sliding_window_pattern:
            has_window = (layer + 1) % self.sliding_window_pattern != 0
        else:
            has_window = layer >= (self.max_window_layers or 0)
        return self.window_size if has_window else None

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has routed experts.

        In a mixture of experts, these are every `decoder_sparse_step`th layer, except `mlp_only_layers`.
        """
        is_dense = layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step != 0
        return self.expert_count > 0 and not is_dense

    def has_state(self, layer: int) -> bool:
        """Whether the layer has linear attention, with a recurrent state.

        These layers are listed in `layer_types`; without it, they are all but the last of every
        `full_attention_interval` layers.
        """
        if self.layer_types:
            return self.layer_types[layer] == "linear_attention"
        return (layer + 1) % self.full_attention_interval != 0


class ExpertStack(Enum):
    """How a tensor of Hugging Face files has a projection of all experts of a layer."""

    ALTERNATING = "[experts, in, out], with gate and up in turn"  # gpt-oss, also in MXFP4
    HALVES = "[experts, out, in], with gate before up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """How a family's GGUF files, as llama.cpp's converter writes them, differ from a Llama's.

    `names`: kind of tensor in the file -> our name, which is llama.cpp's for a Llama, both with or without
    the suffix, such as `.weight`; `defaults`: values of Config's fields that files lack.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False  # the two rows of q or k that form a rotated pair are adjacent
    yarn_truncates: bool = True  # `YarnScaling.truncate`
    finetuned_rotates: bool = False  # `rope.scaling.finetuned` = false means that q and k are not rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: its layers, its configuration fields, and its names in files.

    `names`, `norms_from_zero` and `stacks_experts` describe the tensors of Hugging Face files;
    `gguf` describes GGUF files.
    """

    title: str  # names of the models, for users
    model_type: str  # in `config.json`
    part_of: str | None = None  # `model_type` of directories with towers, whose text model this is
    architecture: str  # in GGUF files and in specs
    layer: Callable[[Config, int], Layer]  # returns the blocks of a layer, given by its number
    fields: AbstractSet[str] = frozenset()  # fields of Config that this family uses, in addition to Llama's
    harmless: AbstractSet[str] = frozenset()  # fields of `config.json` without effect, in addition to Llama's
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for fields that `config.json` lacks
    activations: Mapping[str, Activation] = field(default_factory=ACTIVATIONS.copy)  # others are refused
    names: Mapping[str, str] = field(default_factory=dict)  # tensor names -> ours, in addition to Llama's
    has_draft_layers: bool = False  # files may have draft layers, numbered after the last layer or as `mtp.`
    draft: Callable[[ModelSpec], DraftLayer] | None = None  # the first of these; None: none is built
    copies_vocabulary: bool = False  # an embedding and a head in a draft layer are copies of the model's
    norms_from_zero: bool = False  # norms multiply by 1 + weight
    stacks_experts: ExpertStack | None = None  # one tensor may have a projection of all experts of a layer
    scales_embedding: bool = False  # multiplies embeddings by the square root of `hidden_size`
    gguf: Gguf = Gguf()
    in_gguf: bool = True  # False: no GGUF file of its architecture is supported

    def spec(self, name: str, config: Config) -> ModelSpec:
        """Return the model. Raises ArithmeticError for numbers that give none.

        The residual stream is stored divided by `residual_multiplier`, so layers add to it without a factor.
        Its norms give the same values with an epsilon divided by the multiplier squared.
        """
        residual = config.residual_multiplier or 1.0
        spec = ModelSpec(
            name=name,
            architecture=self.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps / residual**2,
            layers=tuple(self.layer(config, number) for number in range(config.num_hidden_layers)),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            embedding_scale=(config.embedding_multiplier or 1.0) / residual,
            logit_scale=1 / (config.logits_scaling or 1.0),
            logit_cap=config.final_logit_softcapping,
            layer_inputs=config.layer_inputs,
        )
        scores = [
            *(attention.score_scale for attention in spec.blocks_of(Attention)),
            *(attention.score_scale for attention in spec.blocks_of(LatentAttention)),
        ]
        if not all(map(math.isfinite, (spec.rms_norm_eps, spec.embedding_scale, spec.logit_scale, *scores))):
            raise OverflowError("a multiplier is out of range")
        return spec
