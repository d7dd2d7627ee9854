"""Llama (arXiv:2307.09288), Mistral and Mixtral; the other families are variations of Llama.

A layer is attention and a gated feed-forward, each with an RMS norm of its input. Mistral's attention has a
sliding window (arXiv:2310.06825). Mixtral has routed experts (arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.spec import Layer

# Hugging Face's names of tensors -> ours, both without suffixes such as `.weight`. Each is used by several
# families.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The fields of mixtures of experts, and fields of their routers that only matter in training.
EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
ROUTER_TRAINING = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}


def attention(config: Config, layer: int) -> Attention:
    window = config.window(layer)
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_size,
        rope=config.rope if window is None else config.local_rope,
        window=window,
        bias=config.attention_bias,
        output_bias=config.output_bias,
    )


def mlp(config: Config) -> MLP:
    return MLP(features=config.intermediate_size, activation=config.activation, biases=config.mlp_bias)


def experts(config: Config) -> MoE:
    return MoE(
        count=config.expert_count,
        per_token=config.num_experts_per_tok,
        features=config.moe_intermediate_size or config.intermediate_size,
        is_normalised=config.norm_topk_prob,
        activation=config.activation,
    )


def feed_forward(config: Config, layer: int) -> MLP | MoE:
    return experts(config) if config.has_experts(layer) else mlp(config)


def layer(config: Config, number: int) -> Layer:
    return attention(config, number), feed_forward(config, number)


LLAMA = Family(
    title="Llama 2 and 3, SmolLM2, TinyLlama",
    model_type="llama",
    architecture="llama",
    layer=layer,
    in_gguf=False,
)
MISTRAL = replace(LLAMA, title="Mistral", model_type="mistral", part_of="mistral3", architecture="mistral")
MIXTRAL = replace(
    LLAMA,
    title="Mixtral",
    model_type="mixtral",
    fields=EXPERTS,
    harmless=ROUTER_TRAINING,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    names={"block_sparse_moe.gate": "ffn_gate_inp"},
    gguf=Gguf(pairs=True),
    in_gguf=True,  # for Llama and Mistral, too, as their GGUF files have the same architecture
)
