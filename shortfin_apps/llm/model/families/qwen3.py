"""Qwen2 and Qwen2.5 (arXiv:2412.15115), Qwen3 and its mixtures of experts (arXiv:2505.09388).

Qwen2 is Llama with a bias of q, k and v. Qwen3 has no such bias, but an RMS norm of each head of q and k.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.spec import Layer

# The fields of mixtures of experts in which some layers have a dense feed-forward.
SPARSE = llama.EXPERTS | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}


def qwen2_layer(config: Config, number: int) -> Layer:
    attention = replace(llama.attention(config, number), bias=True)
    return attention, llama.feed_forward(config, number)


def qwen3_layer(config: Config, number: int) -> Layer:
    attention = replace(llama.attention(config, number), qk_norm=True)
    return attention, llama.feed_forward(config, number)


QWEN2 = Family(
    title="Qwen2, Qwen2.5",
    model_type="qwen2",
    architecture="qwen2",
    layer=qwen2_layer,
    fields={"use_sliding_window"},
    defaults={"use_sliding_window": False, "max_window_layers": 28},
)
QWEN3 = replace(
    QWEN2,
    title="Qwen3",
    model_type="qwen3",
    architecture="qwen3",
    layer=qwen3_layer,
    defaults={**QWEN2.defaults, "head_dim": 128},
)
QWEN3_MOE = Family(
    title="Qwen3-MoE",
    model_type="qwen3_moe",
    architecture="qwen3moe",
    layer=qwen3_layer,
    fields=SPARSE | {"use_sliding_window"},
    harmless=llama.ROUTER_TRAINING,
    defaults={
        "use_sliding_window": False,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
)
