"""Gemma 4 without images and sound: E2B, E4B, 26B-A4B, 31B, and 12B ("unified").

As Gemma 3, with norms of v, other heads in layers without a window (fewer and larger, v is k, and only the
first frequencies rotate), scores that are not scaled, and a scalar at the end of each layer. In E2B and E4B,
each layer adds a small embedding of the token, and the last layers read keys and values of earlier ones.
26B-A4B has routed experts next to the feed-forward.
"""

from __future__ import annotations

from dataclasses import fields, replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.dual_experts import EXPERT_SCALES, DualExperts
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, ExpertStack, Family, Gguf
from shortfin_apps.llm.model.families.gemma import GEMMA2
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.layer_inputs import LayerInput
from shortfin_apps.llm.model.layer_scale import LayerScale
from shortfin_apps.llm.model.shared_attention import SharedAttention
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    features = config.hidden_size_per_layer_input
    added: list[Block] = [LayerInput(features=features, activation=config.activation)] if features else []
    return attention(config, number), feed_forward(config, number), *added, LayerScale()


def feed_forward(config: Config, number: int) -> MLP | DualExperts:
    if not config.enable_moe_block:
        return mlp(config, number)
    return DualExperts(
        dense=config.intermediate_size,
        count=config.expert_count,
        per_token=config.top_k_experts or 0,
        features=config.moe_intermediate_size or 0,
        activation=config.activation,
    )


def mlp(config: Config, number: int) -> MLP:
    is_wide = config.use_double_wide_mlp and number >= first_sharing(config)
    return replace(llama.mlp(config), features=config.intermediate_size * (1 + is_wide), norm_after=True)


def attention(config: Config, number: int) -> Attention:
    source = source_of(config, number)
    if source != number:
        shared = own_attention(config, source)
        own = {each.name: getattr(shared, each.name) for each in fields(shared)}
        return SharedAttention(**{**own, "is_shared": False}, source=source)
    sharing = range(first_sharing(config), config.num_hidden_layers)
    is_shared = any(source_of(config, other) == number for other in sharing)
    return replace(own_attention(config, number), is_shared=is_shared)


def first_sharing(config: Config) -> int:
    """Return the first layer that reads the keys and values of another one."""
    return config.num_hidden_layers - config.num_kv_shared_layers


def source_of(config: Config, number: int) -> int:
    """Return the layer that stores the keys and values: of the layer's kind, the last one with its own."""
    first = first_sharing(config)
    kind = config.window(number) is None
    own = [other for other in range(max(0, first)) if (config.window(other) is None) is kind]
    if number >= first and not own:
        raise ValueError("layers without others of their kind before them share keys and values")
    return number if number < first else own[-1]


def own_attention(config: Config, number: int) -> Attention:
    block = llama.attention(config, number)
    if config.window(number) is None:
        block = replace(
            block,
            head_dim=config.full_head_size,
            kv_heads=(config.attention_k_eq_v and config.num_global_key_value_heads) or block.kv_heads,
            keys_as_values=config.attention_k_eq_v,
        )
    score_scale = block.head_dim**0.5  # none but this cancels 1 / sqrt(head_dim)
    return replace(block, qk_norm=True, value_norm=True, score_scale=score_scale, norm_after=True)


GEMMA4 = Family(
    title="Gemma 4",
    model_type="gemma4_text",
    part_of="gemma4",
    architecture="gemma4",
    layer=layer,
    fields={
        *("hidden_activation", "final_logit_softcapping", "partial_rotary_factor"),
        *("sliding_window_pattern", "attention_k_eq_v"),
        *("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
        *("num_kv_shared_layers", "use_double_wide_mlp", "rope_local_base_freq"),
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
    },
    harmless={"cache_implementation"},
    stacks_experts=ExpertStack.HALVES,
    defaults={
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    names={
        **GEMMA2.names,
        "layer_scalar": "layer_output_scale.weight",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp_norm.weight",
        "router.per_expert_scale": EXPERT_SCALES,
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
    scales_embedding=True,
    gguf=Gguf(
        names={"ffn_gate_inp.scale": "ffn_gate_inp_norm.weight"},
        defaults={"activation": "gelu"},
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    title="Gemma 4 unified",
    model_type="gemma4_unified_text",
    part_of="gemma4_unified",
    defaults={**GEMMA4.defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
    in_gguf=False,  # its files have the architecture of the others
)
