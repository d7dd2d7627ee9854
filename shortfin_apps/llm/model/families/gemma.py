"""Gemma 2 (arXiv:2408.00118) and Gemma 3 without images (arXiv:2503.19786).

Both are Llama with gelu, norms before and after each block, an embedding multiplied by the square root of
`hidden_size`, another scale of attention scores, and sliding windows in most layers. Gemma 2 caps scores and
logits. Gemma 3 has norms of q and k, and another RoPE base in layers with windows.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62


def gemma2_layer(config: Config, number: int) -> Layer:
    attention = replace(
        llama.attention(config, number),
        cap=config.attn_logit_softcapping,
        score_scale=score_scale(config, GEMMA2_27B_LAYERS),
        norm_after=True,
    )
    return attention, replace(llama.mlp(config), norm_after=True)


def gemma3_layer(config: Config, number: int) -> Layer:
    attention = replace(
        llama.attention(config, number),
        qk_norm=True,
        score_scale=score_scale(config, GEMMA3_27B_LAYERS),
        norm_after=True,
    )
    return attention, replace(llama.mlp(config), norm_after=True)


def score_scale(config: Config, layers_of_27b: int) -> float:
    """Return the factor of attention scores in addition to 1 / sqrt(head_dim).

    GGUF files lack `query_pre_attn_scalar`, which only matters for the 27B model. As in llama.cpp, the 27B is
    recognised by its number of layers.
    """
    scalar = config.query_pre_attn_scalar
    if config.in_gguf and config.num_hidden_layers == layers_of_27b:
        scalar = config.hidden_size / config.num_attention_heads
    return 1.0 if scalar is None else scalar**-0.5 * config.head_size**0.5


GEMMA2 = Family(
    title="Gemma 2",
    model_type="gemma2",
    architecture="gemma2",
    layer=gemma2_layer,
    fields={
        *("hidden_activation", "query_pre_attn_scalar"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    },
    harmless={"cache_implementation"},
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    norms_from_zero=True,
    scales_embedding=True,
    gguf=Gguf(
        defaults={
            "activation": "gelu",
            # Files of 2024 lack these; llama.cpp has the same defaults.
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    ),
)
GEMMA3 = replace(
    GEMMA2,
    title="Gemma 3",
    model_type="gemma3_text",
    part_of="gemma3",
    architecture="gemma3",
    layer=gemma3_layer,
    fields={
        *("hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"),
        *("sliding_window_pattern", "rope_local_base_freq"),
    },
    defaults={
        **GEMMA2.defaults,
        # `text_config` of the published 4B has only what differs from these.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    gguf=Gguf(defaults={"activation": "gelu", "sliding_window_pattern": 6, "rope_local_base_freq": 1e4}),
)
