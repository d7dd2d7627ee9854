"""Granite 3, and the models of Granite 4 without state space layers and experts.

They are Llama with four scalar multipliers: of the embedding, of blocks' outputs, of attention scores and of
logits.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer

SCALARS = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
MAMBA = {
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
    *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
    *("normalization_function", "init_method"),
}


def attention(config: Config, layer: int) -> Attention:
    """Return Llama's attention, with `attention_multiplier` instead of the factor 1 / sqrt(head_dim)."""
    block, scale = llama.attention(config, layer), config.attention_multiplier
    return block if scale is None else replace(block, score_scale=scale * block.head_dim**0.5)


def granite_layer(config: Config, number: int) -> Layer:
    return attention(config, number), llama.mlp(config)


def granite4_layer(config: Config, number: int) -> Layer:
    mixer = attention(config, number)
    if config.position_embedding_type != "rope":
        mixer = replace(mixer, rope=None)
    features = config.shared_intermediate_size or config.intermediate_size
    return mixer, replace(llama.mlp(config), features=features, fused_gate_up=True)


GRANITE = Family(
    title="Granite 3",
    model_type="granite",
    architecture="granite",
    layer=granite_layer,
    fields=SCALARS,
    gguf=Gguf(pairs=True, finetuned_rotates=True),
)
GRANITE4 = Family(
    title="Granite 4 (dense)",
    model_type="granitemoehybrid",
    architecture="granite",
    layer=granite4_layer,
    fields=SCALARS | {"shared_intermediate_size", "position_embedding_type"},
    harmless=llama.ROUTER_TRAINING | MAMBA,
    defaults={"position_embedding_type": "nope"},
    names={"shared_mlp.input_linear": "ffn_gate_up", "shared_mlp.output_linear": "ffn_down"},
    in_gguf=False,
)
