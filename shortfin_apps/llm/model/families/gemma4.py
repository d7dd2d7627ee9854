"""Gemma 4 without images and sound: 31B, and 12B ("unified").

As Gemma 3, with norms of v, other heads in layers without a window (fewer and larger, v is k, and only the
first frequencies rotate), scores that are not scaled, and a scalar at the end of each layer.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.families.gemma import GEMMA2
from shortfin_apps.llm.model.layer_scale import LayerScale
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    return attention(config, number), replace(llama.mlp(config), norm_after=True), LayerScale()


def attention(config: Config, number: int) -> Attention:
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
    },
    harmless={"cache_implementation", "vocab_size_per_layer_input", "use_double_wide_mlp"},
    lacking={
        "enable_moe_block": "a mixture of experts next to a feed-forward (Gemma 4 26B-A4B)",
        "hidden_size_per_layer_input": "an embedding for each layer (Gemma 4 E2B and E4B)",
        "num_kv_shared_layers": "layers that share keys and values (Gemma 4 E2B and E4B)",
    },
    defaults={
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
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
    names={**GEMMA2.names, "layer_scalar": "layer_output_scale.weight"},
    scales_embedding=True,
    in_gguf=False,
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    title="Gemma 4 unified",
    model_type="gemma4_unified_text",
    part_of="gemma4_unified",
    defaults={**GEMMA4.defaults, "sliding_window": 1024},
)
