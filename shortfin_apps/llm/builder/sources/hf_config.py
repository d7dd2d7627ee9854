"""The fields of a Hugging Face `config.json`, and the blocks that they describe."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat

from shortfin_apps.llm.builder.sources.base import (
    LayerCount,
    Size,
)
from shortfin_apps.llm.builder.sources.hf_families import HF_FAMILIES, HfFamily
from shortfin_apps.llm.builder.sources.hf_rope import HfRope
from shortfin_apps.llm.builder.sources.known_fields import HF_CONFIG, HF_ROPE
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.granite import Multipliers
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import Layer

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROPE_KINDS = ("full_attention", "sliding_attention")


class HfConfig(BaseModel):
    """The fields of `config.json` that a decoder needs."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore", protected_namespaces=())

    model_type: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: LayerCount
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: PositiveFloat | None = None
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    tie_word_embeddings: bool | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    sliding_window_pattern: Size | None = None
    max_window_layers: NonNegativeInt | None = None
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: dict[str, Any] | None = None
    no_rope_layers: list[bool] | None = None
    no_rope_layer_interval: Size | None = None
    embedding_multiplier: PositiveFloat | None = None
    residual_multiplier: PositiveFloat | None = None
    attention_multiplier: PositiveFloat | None = None
    logits_scaling: PositiveFloat | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    num_experts: NonNegativeInt | None = None
    num_local_experts: NonNegativeInt | None = None  # an alias
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: Size | None = None  # None: `intermediate_size`
    shared_intermediate_size: Size | None = None  # of the feed-forward next to the experts
    shared_expert_intermediate_size: Size | None = None
    position_embedding_type: str = "rope"
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    eos_token_id: int | list[int] | None = None
    attn_output_gate: bool = True
    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32

    @property
    def rope(self) -> HfRope:
        rope = self.rope_parameters or self.rope_scaling or HfRope()
        rope = rope.full_attention or rope
        original = self.original_max_position_embeddings or rope.original_max_position_embeddings
        return rope.model_copy(update={"original_max_position_embeddings": original})

    @property
    def family(self) -> HfFamily:
        return HF_FAMILIES[self.model_type]

    @property
    def local_rope(self) -> HfRope | None:
        """The rotation of layers with a window, if it differs from the other layers'."""
        given = self.rope_parameters and self.rope_parameters.sliding_attention
        theta = self.rope_local_base_freq
        if given is None:
            return None if theta is None else HfRope(rope_theta=theta)
        return given.model_copy(update={"rope_theta": given.rope_theta or theta or self.rope_theta})

    @property
    def own_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def activation(self) -> Activation | None:
        """The activation; None if it is not supported."""
        if self.family.activation is not None:
            return self.family.activation
        return ACTIVATIONS.get(self.hidden_activation or self.hidden_act)

    @property
    def rotated_dim(self) -> int:
        """The number of elements of a head that rotate."""
        share = self.rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        return int(self.own_head_dim * share)

    @property
    def unrotated_layers(self) -> tuple[int, ...]:
        """The layers that do not rotate.

        `no_rope_layers` has 1 for layers that rotate; without it, the last layer of each interval does not.
        """
        if self.position_embedding_type != "rope":
            return tuple(range(self.num_hidden_layers))
        if "no_rope_layers" not in self.family.fields:
            return ()
        interval, layers = self.no_rope_layer_interval or 4, range(self.num_hidden_layers)
        rotated = self.no_rope_layers or [(layer + 1) % interval != 0 for layer in layers]
        return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)

    @property
    def embedding_scale(self) -> float:
        """The embedding's scale, rounded to the type of the weights as in transformers."""
        if not self.family.scales_embedding:
            return 1.0
        rounded = ROUNDED.get(self.dtype or self.torch_dtype or "float32", np.float32)
        return float(rounded(self.hidden_size**0.5))

    @property
    def multipliers(self) -> Multipliers:
        scalar = self.query_pre_attn_scalar
        return Multipliers(
            embedding=self.embedding_multiplier or self.embedding_scale,
            residual=self.residual_multiplier or 1.0,
            attention=self.attention_multiplier or (scalar and scalar**-0.5),
            logits=self.logits_scaling or 1.0,
        )

    def feed_forward(self, layer: int) -> MLP | MoE:
        """Return the experts of every `decoder_sparse_step`th layer that is not in `mlp_only_layers`."""
        given = [count for count in (self.num_experts, self.num_local_experts) if count is not None]
        count, family = given[0] if given else 128, self.family
        is_listed = layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step
        if not family.has_experts or not count or is_listed:
            return MLP(
                features=self.shared_intermediate_size or self.intermediate_size,
                activation=self.activation or "silu",
                norm_before=family.norms_before,
                norm_after=family.norms_after,
                fused_gate_up=family.has_fused_gate_up,
            )
        return MoE(
            count=count,
            per_token=self.num_experts_per_tok,
            features=self.moe_intermediate_size or self.intermediate_size,
            is_normalised=self.norm_topk_prob,
            activation=self.activation or "silu",
            biases=family.stacks_experts,
            shared=self.shared_expert_intermediate_size,
            norm_before=family.norms_before,
        )

    @property
    def delta_layers(self) -> set[int]:
        """The gated delta nets: the layers listed in `layer_types`, or all but the last of each interval."""
        if not self.family.has_delta_nets:
            return set()
        layers, interval = range(self.num_hidden_layers), self.full_attention_interval
        by_interval = ["linear_attention" if (n + 1) % interval else "full_attention" for n in layers]
        kinds = zip(layers, self.layer_types or by_interval, strict=True)
        return {layer for layer, kind in kinds if kind == "linear_attention"}

    @property
    def delta_net(self) -> DeltaNet:
        return DeltaNet(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            fused_inputs=self.family.has_fused_delta_nets,
            fused_rates=self.family.has_fused_delta_nets,
        )

    def layers(self, where: str) -> tuple[Layer, ...]:
        """Return the blocks of each layer. Raises BuildError for rotations that are not supported."""
        dim = None if self.rotated_dim == self.own_head_dim else self.rotated_dim
        scaling = self.rope.scaling(where, self.max_position_embeddings, self.rotated_dim)
        theta = self.rope.rope_theta or self.rope_theta or 10000.0
        whole = Rope(theta=theta, scaling=scaling, dim=dim)
        local = whole
        if self.local_rope is not None and self.local_rope.rope_theta is not None:
            local = Rope(theta=self.local_rope.rope_theta, dim=dim, name="local")
        family, windowed, unrotated = self.family, set(self.windowed_layers), set(self.unrotated_layers)

        def attention(layer: int) -> Attention:
            rope = local if layer in windowed else whole
            return Attention(
                heads=self.num_attention_heads,
                kv_heads=self.num_key_value_heads or self.num_attention_heads,
                head_dim=self.own_head_dim,
                rope=None if layer in unrotated else rope,
                window=self.window if layer in windowed else None,
                sinks=family.has_sinks,
                cap=self.attn_logit_softcapping,
                qk_norm=family.qk_norm,
                whole_qk_norm=family.whole_qk_norm,
                bias=self.attention_bias or family.qkv_bias,
                output_bias=self.attention_bias,
                gate=family.has_delta_nets and self.attn_output_gate,
                norm_before=family.norms_before,
                norm_after=family.norms_after,
                fused_qkv=family.has_fused_qkv,
            )

        numbers, delta_layers = range(self.num_hidden_layers), self.delta_layers
        mixers = (self.delta_net if n in delta_layers else attention(n) for n in numbers)
        return tuple((mixer, self.feed_forward(n)) for n, mixer in enumerate(mixers))

    @property
    def window(self) -> int | None:
        """The number of tokens that a layer with sliding attention sees; None without such layers."""
        is_on = self.use_sliding_window or not self.family.window_has_switch
        return self.sliding_window if is_on else None

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers with a window: by `layer_types`, by interval, or from `max_window_layers` on."""
        layers = range(self.num_hidden_layers)
        if self.window is None:
            return ()
        if self.layer_types:
            kinds = zip(layers, self.layer_types, strict=True)
            return tuple(layer for layer, kind in kinds if kind == "sliding_attention")
        if interval := self.sliding_window_pattern:
            return tuple(layer for layer in layers if (layer + 1) % interval)
        return tuple(layers[self.max_window_layers or 0 :])


def check_fields(where: str, family: HfFamily, raw: dict[str, Any], accepted: Collection[str]) -> None:
    """Raise BuildError for a field that would change the computation; `raw` is valid for `HfConfig`."""
    HF_CONFIG.using(family.fields | family.harmless).check(where, raw, accepted)
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        parts = {f"{name}.{kind}.": rope[kind] for kind in ROPE_KINDS if rope.get(kind)}
        for prefix, fields in {f"{name}.": rope, **parts}.items():
            HF_ROPE.using(family.fields).check(where, fields, accepted, prefix)
