"""gpt-oss (arXiv:2508.10925): routed experts in all layers, sliding windows in every second layer.

Attention has sinks: each head's softmax has an extra learned score. All projections have a bias, and the
experts' SwiGLU clamps its inputs.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, ExpertStack, Family, Gguf
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = replace(llama.attention(config, number), sinks=True)
    return attention, replace(llama.experts(config), biases=True)


GPT_OSS = Family(
    title="gpt-oss",
    model_type="gpt_oss",
    architecture="gpt-oss",
    layer=layer,
    fields=llama.EXPERTS,
    # `experts_per_token` and `initial_context_length` repeat other fields.
    harmless=llama.ROUTER_TRAINING | {"experts_per_token", "initial_context_length"},
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    activations={"silu": "clamped"},
    names={"self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp"},
    stacks_experts=ExpertStack.ALTERNATING,
    gguf=Gguf(
        names={"post_attention_norm": "ffn_norm"},
        defaults={"activation": "clamped", "sliding_window_pattern": 2},
        yarn_truncates=False,
    ),
)
