"""Qwen3-Next and Qwen3.5: Qwen3 with gated delta nets in three of four layers.

Every fourth layer has attention with an output gate. Mixtures of experts also have a shared expert, which all
tokens use.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, ExpertStack, Family, Gguf
from shortfin_apps.llm.model.families.qwen3 import SPARSE
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.spec import Layer, ModelSpec

FIELDS = {
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"),
    *("attn_output_gate", "partial_rotary_factor", "mtp_num_hidden_layers"),
}
EXPERTS = llama.EXPERTS | {"shared_expert_intermediate_size"}
# The dtype of states (always f32 here), and whether draft layers have their own embedding.
HARMLESS = {"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"}
NAMES = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def qwen3_5_layer(config: Config, number: int) -> Layer:
    # llama.cpp's converter reorders value heads: value head i uses key head i modulo the number of key heads.
    net = replace(delta_net(config), tiled=config.in_gguf)
    return net if config.has_state(number) else attention(config, number), feed_forward(config, number)


def qwen3_next_layer(config: Config, number: int) -> Layer:
    # llama.cpp's converter splits the fused tensor: q, k and v in one, the gates in another.
    net = replace(delta_net(config), fused_inputs=not config.in_gguf, fused_rates=True)
    return net if config.has_state(number) else attention(config, number), feed_forward(config, number)


def draft_layer(spec: ModelSpec) -> DraftLayer:
    """Return the draft layer, which is like the layers with attention."""
    return DraftLayer(blocks=next(layer for layer in spec.layers if isinstance(layer[0], Attention)))


def delta_net(config: Config) -> DeltaNet:
    return DeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
    )


def attention(config: Config, layer: int) -> Attention:
    return replace(llama.attention(config, layer), qk_norm=True, gate=config.attn_output_gate)


def feed_forward(config: Config, layer: int) -> MLP | MoE:
    if not config.has_experts(layer):
        return llama.mlp(config)
    return replace(llama.experts(config), shared=config.shared_expert_intermediate_size)


QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_type="qwen3_next",
    architecture="qwen3next",
    layer=qwen3_next_layer,
    fields=FIELDS | EXPERTS | SPARSE,
    harmless=llama.ROUTER_TRAINING,
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    names=NAMES,
    has_draft_layers=True,
    draft=draft_layer,
    norms_from_zero=True,
    gguf=Gguf(names={"post_attention_norm": "ffn_norm"}),
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    title="Qwen3.5",
    model_type="qwen3_5_text",
    part_of="qwen3_5",
    architecture="qwen35",
    layer=qwen3_5_layer,
    fields=FIELDS,
    harmless=HARMLESS,
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    title="Qwen3.5-MoE",
    model_type="qwen3_5_moe_text",
    part_of="qwen3_5_moe",
    stacks_experts=ExpertStack.HALVES,
    architecture="qwen35moe",
    layer=qwen3_5_layer,
    fields=FIELDS | EXPERTS,
    harmless=HARMLESS | llama.ROUTER_TRAINING,
    defaults={
        **QWEN3_NEXT.defaults,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "intermediate_size": 512,  # no layer uses it
    },
)
