"""Records the logits of tiny random models of every family, as transformers computes them in f32.

    pip install torch==2.15.0 transformers==5.23.0
    python tests/golden/make_family_logits.py [NAME ...]

In an environment of its own, for the named ones of MODELS, or all. family_logits.json beside this file then
has, of each of MODELS: the config.json that transformers writes, the shapes of the tensors, whose values
family_weights.py makes again, and the logits behind each of POSITIONS tokens of one prompt. Sizes are odd on
purpose: heads and vocabularies that are no multiples of 16.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parents[2]))

from tests.golden.family_weights import weight

OUT = Path(__file__).with_name("family_logits.json")
PROMPT = [(37 * i + i // 5) % 83 for i in range(1, 91)]
POSITIONS = [1, 17, 64, 90]
SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str, **values: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


WIDE = {"head_dim": 24}
GEMMA: dict[str, Any] = {
    "head_dim": 20,
    "query_pre_attn_scalar": 20,
    "sliding_window": 21,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}
GEMMA4: dict[str, Any] = {
    "head_dim": 20,
    "global_head_dim": 40,
    "sliding_window": 21,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
# By name: transformers' class, and what differs from SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, **WIDE, **rope("linear", factor=2.5)}),
    "llama-yarn": (
        "Llama",
        WIDE | rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    ),
    "llama-yarn-not-truncated": (
        "Llama",
        WIDE
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.9, truncate=False),
    ),
    "llama3": (
        "Llama",
        WIDE
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 6, "sliding_window": None}),
    "phi4-mini": (
        "Phi3",
        {
            "hidden_size": 96,
            "num_attention_heads": 4,
            "max_position_embeddings": 96,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "sliding_window": 262144,
            **rope(
                "longrope",
                short_factor=[1.0] * 9,
                long_factor=[1.0 + 0.5 * i for i in range(9)],
                partial_rotary_factor=0.75,
            ),
        },
    ),
    "qwen2": ("Qwen2", {"sliding_window": 32, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 20, "rope_theta": 50000.0, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 20,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {**WIDE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, **rope("default"), "tie_word_embeddings": True}),
    "smollm3-listed": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "attention_bias": True, **rope("yarn", factor=4.0)},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": (
        "Ministral3",
        WIDE
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=20,
            beta_fast=8.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "ministral3-tied": (
        "Ministral3",
        WIDE
        | {"tie_word_embeddings": True}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.0,
            mscale_all_dim=0.5,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "olmo2": ("Olmo2", {"rope_theta": 50000.0}),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3-otherwise": (
        "Gemma3",
        GEMMA
        | {
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 7,
            "final_logit_softcapping": 40.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 40.0},
    ),
    "gemma4-e": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention", "full_attention"] * 3],
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 83,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-unified": ("Gemma4Unified", GEMMA4 | {"layer_types": ["full_attention"] * 2}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"num_hidden_layers": 3, "attn_logit_softcapping": 8.0, "final_logit_softcapping": 60.0},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 20,
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 21,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "deepseek2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_routed_experts": 7,
            "topk_method": "greedy",
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        },
    ),
    "deepseek2-groups": (
        "DeepseekV2",
        LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek3": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=1.0,
                mscale_all_dim=0.5,
            ),
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "n_routed_experts": 7,
            "routed_scaling_factor": 1.8,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            **rope("default", partial_rotary_factor=0.4),
        },
    ),
    "qwen3-bias": ("Qwen3", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen35": (
        "Qwen3_5",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "head_dim": 20,
            **rope("default", partial_rotary_factor=0.4),
        },
    ),
    "qwen35-moe": (
        "Qwen3_5Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "head_dim": 20,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            **rope("default", partial_rotary_factor=0.4),
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "head_dim": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            **rope("default", partial_rotary_factor=0.4),
        },
    ),
}
WITH_TEXT_CONFIG = (
    "Gemma3",
    "Gemma4",
    "Gemma4Unified",
    "Qwen3_5",
    "Qwen3_5Moe",
)  # whose other configuration has a vision tower


def record(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = getattr(transformers, f"{kind}{'Text' if kind in WITH_TEXT_CONFIG else ''}Config")(
        **{**SIZES, **changes}
    )
    config._attn_implementation = "eager"  # others leave out caps of scores
    cls = getattr(transformers, f"{kind}ForCausalLM")
    with TemporaryDirectory() as folder:
        cls(config).save_pretrained(folder)
        file = Path(folder, "model.safetensors")
        shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
        save_file({name: weight(name, shape) for name, shape in shapes.items()}, file, {"format": "pt"})
        model = cls.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return {
        "made_with": {name: version(name) for name in ("torch", "transformers")},
        "config": json.loads(config.to_json_string(use_diff=False)),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "logits": [[round(float(v), 7) for v in logits[p - 1]] for p in POSITIONS],
    }


def main(names: list[str]) -> None:
    """`made_with` of all models is of those that have none of their own."""
    torch.manual_seed(0)
    golden = json.loads(OUT.read_text())
    golden |= {"prompt": PROMPT, "positions": POSITIONS}
    golden["models"] |= {name: record(*MODELS[name]) for name in names or MODELS}
    OUT.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
