"""What the families share: the configuration that they read, and what each of them defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import Layer, ModelSpec

MAX_LAYERS = 4096
# Limited, as lists with an item per layer are created before the layers' tensors are looked up.
LayerCount = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
# Limited, as JSON numbers have any length; these can be converted to floats, multiplied and printed.
Size = Annotated[int, Field(gt=0, lt=1 << 63)]

# The fields that the reader of a file sets; `config.json` does not have them.
SET_BY_READER = frozenset({"in_gguf", "activation", "output_bias", "rotated_dim", "rope", "local_rope"})


class Config(BaseModel):
    """Sizes and switches of a model, named as in Hugging Face's `config.json`.

    The keys of GGUF files are renamed to these. A field that no family lists in its `fields` is accepted for
    all families.
    """

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    in_gguf: bool = False
    activation: Activation = "silu"
    output_bias: bool = False  # of attention's output; `attention_bias` is the one of q, k and v
    rotated_dim: Size | None = None  # elements of a head that rotate; None: all
    rope: Rope = Rope()
    local_rope: Rope = Rope()  # of layers with a window

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
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
    attention_bias: bool = False
    attention_multiplier: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    attn_output_gate: bool = True
    query_pre_attn_scalar: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    position_embedding_type: str = "rope"
    no_rope_layers: list[bool] | None = None
    no_rope_layer_interval: Size | None = None
    layer_types: list[str] | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: Size | None = None
    max_window_layers: NonNegativeInt | None = None

    num_experts: NonNegativeInt | None = None
    num_local_experts: NonNegativeInt | None = None  # an alias
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: Size | None = None  # None: `intermediate_size`
    shared_expert_intermediate_size: Size | None = None
    shared_intermediate_size: Size | None = None  # of the feed-forward next to the experts
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None

    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    mtp_num_hidden_layers: NonNegativeInt | None = None  # of a draft model, which is left out

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_count(self) -> int:
        counts = (self.num_experts, self.num_local_experts)
        return next((count for count in counts if count is not None), 0)

    @property
    def window_size(self) -> int | None:
        """The tokens that a layer with sliding attention sees; None without such layers."""
        return self.sliding_window if self.use_sliding_window else None

    def window(self, layer: int) -> int | None:
        """Return the tokens that the layer sees; None for all.

        Windows are in the layers listed in `layer_types`, in all but the last of each interval, or from
        `max_window_layers` on.
        """
        if self.layer_types:
            has_window = self.layer_types[layer] == "sliding_attention"
        elif self.sliding_window_pattern:
            has_window = (layer + 1) % self.sliding_window_pattern != 0
        else:
            has_window = layer >= (self.max_window_layers or 0)
        return self.window_size if has_window else None

    def has_experts(self, layer: int) -> bool:
        """Whether it is a `decoder_sparse_step`th layer that is not in `mlp_only_layers`, of a mixture."""
        is_dense = layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step != 0
        return self.expert_count > 0 and not is_dense

    def has_state(self, layer: int) -> bool:
        """Whether the layer is linear: as `layer_types` lists, or all but the last of each interval."""
        if self.layer_types:
            return self.layer_types[layer] == "linear_attention"
        return (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """What differs in a family's GGUF files, which llama.cpp's converter writes.

    `names` renames kinds of tensors to our names, which are llama.cpp's for a Llama. `defaults` are for
    fields that files lack.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False  # rows of q and k that rotate together are neighbours
    yarn_truncates: bool = True  # rounds the bounds of the slowed frequencies to an index
    finetuned_rotates: bool = False  # `rope.scaling.finetuned` = false disables rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with the same blocks.

    `names`, `ignored`, `norms_from_zero` and `stacks_experts` describe tensors of Hugging Face files, `gguf`
    describes GGUF files.
    """

    title: str  # the models, for users
    model_type: str  # in `config.json`
    architecture: str  # in GGUF files and in specs
    layer: Callable[[Config, int], Layer]  # the blocks of a layer, by its number
    fields: AbstractSet[str] = frozenset()  # of the configuration, in addition to Llama's
    harmless: AbstractSet[str] = frozenset()  # fields of `config.json` without effect, likewise
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that `config.json` may lack
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors, in addition to Llama's
    ignored: tuple[str, ...] = ()  # prefixes of names of tensors that are left out
    norms_from_zero: bool = False  # norms add 1 to their weights
    stacks_experts: bool = False  # one tensor has a projection of all experts of a layer
    scales_embedding: bool = False  # by the square root of `hidden_size`
    gguf: Gguf = Gguf()
    in_gguf: bool = True  # False: its GGUF files have the architecture of another family

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
        )
        scores = (attention.score_scale for attention in spec.blocks_of(Attention))
        if not all(map(math.isfinite, (spec.rms_norm_eps, spec.embedding_scale, spec.logit_scale, *scores))):
            raise OverflowError("a multiplier is out of range")
        return spec
