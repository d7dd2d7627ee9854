"""GLM-4.5: published configurations, and what they make of attention and experts."""

from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.builder.sources.base import check_spec
from shortfin_apps.llm.builder.sources.hf_config import hf_family, read_config
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.feed_forward import MLP, MoE

# The fields of GLM-4.5-Air's config.json, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 12,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 1024,
}


@pytest.mark.parametrize("has_norms", [False, True])
def test_the_fields_of_published_files_are_known(has_norms: bool) -> None:
    raw = PUBLISHED | {"use_qk_norm": has_norms}
    family = hf_family("x", raw)
    config, _ = read_config("x", family, raw, ())
    spec = family.spec("x", config)
    check_spec("x", spec)
    [attention] = spec.blocks_of(Attention)
    assert (attention.qk_norm, attention.bias, attention.output_bias) == (has_norms, True, False)
    assert attention.rope is not None
    assert attention.rope.dim == 16
    assert spec.experts is not None
    assert spec.experts.scores == ExpertScores(is_sigmoid=True, bias=True, summed=2)
    assert (spec.experts.scale, spec.experts.shared, spec.experts.gates_shared) == (2.5, 64, False)
    assert [type(feed_forward) for _, feed_forward in spec.layers] == [MLP, MoE, MoE]
