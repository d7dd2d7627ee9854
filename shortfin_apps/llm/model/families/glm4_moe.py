"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): Llama's attention, and DeepSeek-V3's experts and draft layer.

A part of each head rotates. Some models norm the heads of q and k, as Qwen3's.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import deepseek, llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = replace(llama.attention(config, number), qk_norm=config.use_qk_norm, output_bias=False)
    return attention, deepseek.feed_forward(config, number)


GLM4_MOE = Family(
    title="GLM-4.5, 4.6, 4.7",
    model_type="glm4_moe",
    part_of="glm4v_moe",
    architecture="glm4moe",
    layer=layer,
    fields={*deepseek.EXPERTS, "use_qk_norm", "partial_rotary_factor"},
    harmless=deepseek.HARMLESS,
    defaults={
        **deepseek.SIGMOID,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    names=deepseek.EXPERT_NAMES,
    has_draft_layers=True,
    draft=deepseek.draft_layer,
    copies_vocabulary=True,
    gguf=Gguf(names={"post_attention_norm": "ffn_norm"}),
)
