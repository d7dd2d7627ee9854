"""Files of models with latent attention: scores of experts, scales of scores, layers of a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.base import check_spec
from shortfin_apps.llm.builder.sources.hf_config import hf_family, read_config
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.latent_attention import LatentAttention
from tests.builder.golden_families import F32, GoldenFamily, stored_weights


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("deepseek2", None),
        ("deepseek2-groups", ExpertScores(is_sigmoid=False, groups=4, kept_groups=2)),
        ("deepseek3", ExpertScores(is_sigmoid=True, bias=True, groups=3, kept_groups=2, summed=2)),
        ("glm4-moe-lite", ExpertScores(is_sigmoid=True, bias=True, summed=2)),
    ],
)
def test_a_file_says_how_experts_are_scored(tmp_path: Path, name: str, scores: ExpertScores | None) -> None:
    spec = HfDirectorySource(GoldenFamily.of(name).write_hf(tmp_path)).spec
    assert spec.experts is not None
    assert spec.experts.scores == scores


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"rope_type": "default", "mscale_all_dim": 1.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.0}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.8738542),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.5896262),
    ],
)
def test_scores_are_scaled_for_yarn(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    """(0.1 * mscale_all_dim * ln(40) + 1)^2, as in DeepSeek's own code."""
    family = GoldenFamily.of("deepseek3")
    family.config["rope_parameters"] = {
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        **fields,
    }
    [block] = HfDirectorySource(family.write_hf(tmp_path)).spec.blocks_of(LatentAttention)
    assert block.score_scale == pytest.approx(scale)


def test_a_draft_layer_without_its_projection_is_left_out(tmp_path: Path) -> None:
    family = GoldenFamily.of("deepseek3")
    plain = HfDirectorySource(family.write_hf(tmp_path / "plain"))
    family.tensors["model.layers.3.enorm.weight"] = np.zeros(48, np.float32)
    family.tensors["model.layers.3.self_attn.kv_a_layernorm.weight"] = np.zeros(20, np.float32)
    source = HfDirectorySource(family.write_hf(tmp_path / "with_draft"))
    assert plain.left_out is None
    assert source.left_out == "layers of a draft model (2 tensors, 0.0 MB)"
    assert stored_weights(source).keys() == stored_weights(plain).keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "a bias in latent attention"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ({"scoring_func": "tanh"}, "`scoring_func`: Input should be 'softmax' or 'sigmoid'"),
        ({"topk_method": "best"}, "`topk_method`: Input should be"),
        ({"n_group": 5}, "12 experts in 5 groups"),
        ({"qk_rope_head_dim": 7}, "7 elements of a head cannot be rotated in pairs"),
    ],
)
def test_other_configurations_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    family = GoldenFamily.of("deepseek3")
    family.config.update(fields)
    with pytest.raises(BuildError, match=message):
        HfDirectorySource(family.write_hf(tmp_path))


def test_matrices_may_be_8_bit_floats_in_tiles(tmp_path: Path) -> None:
    """As in V3's files; the last tiles are not whole, and the rotated rows are in pairs."""
    family = GoldenFamily.of("deepseek3")
    family.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    expected = {}
    for name in [name for name in family.tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        quants, scales, values = _in_tiles(family.tensors[name])
        family.tensors.update({name: quants, f"{name}_scale_inv": scales})
        expected[name] = values
    source = HfDirectorySource(family.write_hf(tmp_path / "fp8"))
    del family.config["quantization_config"]
    family.tensors.update(expected)
    for name in expected:
        del family.tensors[f"{name}_scale_inv"]
    whole = stored_weights(HfDirectorySource(family.write_hf(tmp_path / "floats")))
    for weight, values in stored_weights(source).items():
        np.testing.assert_allclose(values, whole[weight], rtol=1e-6, err_msg=weight)


def _in_tiles(matrix: F32, size: int = 16) -> tuple[np.ndarray[Any, Any], F32, F32]:
    """8-bit floats, the scale of each tile, and the values of both."""
    rows, columns = (-(-length // size) for length in matrix.shape)
    rng = np.random.default_rng(rows)
    scales = rng.uniform(0.01, 0.02, (rows, columns)).astype(np.float32)
    spread = np.repeat(np.repeat(scales, size, 0), size, 1)[: matrix.shape[0], : matrix.shape[1]]
    quants = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
    return quants, scales, quants.astype(np.float32) * spread


# Of the published files: what they have in common, and what they have of their own.
PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
YARN = {"beta_fast": 32, "beta_slow": 1, "type": "yarn", "original_max_position_embeddings": 4096}
FILES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
    },
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "n_routed_experts": 256,
        "num_attention_heads": 128,
    },
    "kimi_k2": {
        "q_lora_rank": 1536,
        "rope_theta": 50000.0,
        "rope_scaling": YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "n_routed_experts": 384,
        "num_attention_heads": 64,
    },
    "glm4_moe_lite": {
        "q_lora_rank": 768,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_attention_heads": 20,
    },
}


@pytest.mark.parametrize("model_type", FILES)
def test_the_fields_of_published_files_are_known(model_type: str) -> None:
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
    }
    raw = {"model_type": model_type, **sizes, **PUBLISHED, **FILES[model_type]}
    family = hf_family("x", raw)
    config, _ = read_config("x", family, raw, ())
    spec = family.spec("x", config)
    check_spec("x", spec)
    [block] = spec.blocks_of(LatentAttention)
    assert block.kv_layout == KeysValues(1, 576, values_in_keys=True)
    assert spec.experts is not None
    assert spec.experts.count == FILES[model_type]["n_routed_experts"]
    assert [type(feed_forward) for _, feed_forward in spec.layers] == [MLP, MoE, MoE]
