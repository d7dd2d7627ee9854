"""Properties of a Hugging Face `model_type` that `config.json` omits, or states in separate fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shortfin_apps.llm.builder.sources.base import unsupported
from shortfin_apps.llm.model.operations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """The differences from Llama, as in transformers' classes for the `model_type`."""

    architecture: str | None = None  # the spec's, if it is not the `model_type`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that `config.json` may lack
    qkv_bias: bool = False  # regardless of `attention_bias`
    qk_norm: bool = False
    whole_qk_norm: bool = False
    norms_before: bool = True
    norms_after: bool = False
    norms_from_zero: bool = False  # norms add 1 to their weights
    scales_embedding: bool = False  # by the square root of hidden_size
    renamed: Mapping[str, str] = field(default_factory=dict)  # tensors of a layer, in addition to GGUF_NAMES
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    fields: frozenset[str] = frozenset()  # of `config.json`, which Llama rejects unless they are neutral
    harmless: frozenset[str] = frozenset()  # fields that Llama rejects, and that have no effect here
    has_experts: bool = False
    stacks_experts: bool = False  # one tensor holds all of a layer, with biases (hf_matrices.py)
    has_sinks: bool = False
    activation: Activation | None = None  # regardless of `hidden_act`
    has_delta_nets: bool = False  # in `linear_attention` layers; others have gates of attention's result
    has_fused_delta_nets: bool = False  # delta net projections are two tensors
    ignored: tuple[str, ...] = ()  # name prefixes of tensors that the decoder does not use
    window_has_switch: bool = False  # `sliding_window` only counts with `use_sliding_window`


GRANITE = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"})
QWEN3_MOE = frozenset(
    {
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    }
)
EXPERT_COUNTS = frozenset({"num_local_experts", "num_experts_per_tok"})
ROUTER_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
MAMBA = frozenset(
    {
        *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
        *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
        *("normalization_function", "init_method"),
    }
)
SMOLLM3 = frozenset({"no_rope_layers", "no_rope_layer_interval"})
QWEN3_5 = frozenset(
    {
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"),
        *("attn_output_gate", "partial_rotary_factor"),
    }
)
QWEN3_5_MOE = frozenset(
    {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
)
GEMMA = frozenset({"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"})

_NORMS_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA: dict[str, Any] = {
    "norms_after": True,
    "norms_from_zero": True,
    "scales_embedding": True,
    "renamed": _NORMS_AFTER,
    "harmless": frozenset({"cache_implementation"}),
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_DELTA_NETS = {
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
}
_SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
}
_QWEN3_5: dict[str, Any] = {
    "qk_norm": True,
    "norms_from_zero": True,
    "has_delta_nets": True,
    "ignored": ("mtp.",),
}
_QWEN3_NEXT_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
# The type of states, which are always f32 here, and a draft model.
_QWEN3_5_HARMLESS = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})

_GPT_OSS_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "norm_topk_prob": True,
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
}

HF_FAMILIES: Mapping[str, HfFamily] = {
    "gemma2": HfFamily(
        fields=GEMMA | {"attn_logit_softcapping"},
        defaults=_GEMMA_DEFAULTS
        | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **_GEMMA,
    ),
    "gemma3_text": HfFamily(
        architecture="gemma3",
        qk_norm=True,
        fields=GEMMA | {"sliding_window_pattern", "rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        **_GEMMA,
    ),
    "gpt_oss": HfFamily(
        architecture="gpt-oss",
        has_experts=True,
        stacks_experts=True,
        has_sinks=True,
        activation="clamped",
        fields=EXPERT_COUNTS,
        # the last two repeat other fields
        harmless=ROUTER_TRAINING | {"experts_per_token", "initial_context_length"},
        defaults=_GPT_OSS_DEFAULTS,
    ),
    "granite": HfFamily(fields=GRANITE),
    "granitemoehybrid": HfFamily(  # Granite 4; other sizes have state space layers and experts
        architecture="granite",
        has_fused_gate_up=True,
        renamed={"shared_mlp.input_linear": "ffn_gate_up", "shared_mlp.output_linear": "ffn_down"},
        fields=GRANITE | {"shared_intermediate_size", "position_embedding_type"},
        harmless=ROUTER_TRAINING | MAMBA,
        defaults={"position_embedding_type": "nope"},
    ),
    "llama": HfFamily(),
    "mistral": HfFamily(),
    "mixtral": HfFamily(
        architecture="llama",
        has_experts=True,
        fields=EXPERT_COUNTS,
        harmless=ROUTER_TRAINING,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "olmo2": HfFamily(whole_qk_norm=True, norms_before=False, norms_after=True, renamed=_NORMS_AFTER),
    "phi3": HfFamily(
        has_fused_qkv=True,
        has_fused_gate_up=True,
        fields=frozenset({"partial_rotary_factor"}),
        harmless=frozenset({"auto_map"}),  # transformers includes that code by now
    ),
    "qwen2": HfFamily(qkv_bias=True, window_has_switch=True, defaults={"max_window_layers": 28}),
    "qwen3": HfFamily(
        qk_norm=True, window_has_switch=True, defaults={"head_dim": 128, "max_window_layers": 28}
    ),
    "qwen3_moe": HfFamily(
        qk_norm=True,
        has_experts=True,
        fields=QWEN3_MOE,
        harmless=ROUTER_TRAINING,
        defaults={"moe_intermediate_size": 768, "num_experts_per_tok": 8},
        window_has_switch=True,
    ),
    "qwen3_next": HfFamily(
        architecture="qwen3next",
        has_experts=True,
        has_fused_delta_nets=True,
        fields=QWEN3_5 | QWEN3_5_MOE | QWEN3_MOE,
        harmless=ROUTER_TRAINING,
        defaults=_QWEN3_NEXT_DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10},
        renamed=_DELTA_NETS | _SHARED_EXPERT,
        **_QWEN3_5,
    ),
    "qwen3_5_moe_text": HfFamily(
        architecture="qwen35moe",
        has_experts=True,
        fields=QWEN3_5 | QWEN3_5_MOE,
        harmless=_QWEN3_5_HARMLESS | ROUTER_TRAINING,
        defaults=_QWEN3_NEXT_DEFAULTS
        | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},  # no layer uses the last
        renamed=_DELTA_NETS | _SHARED_EXPERT,
        **_QWEN3_5,
    ),
    "qwen3_5_text": HfFamily(
        architecture="qwen35",
        fields=QWEN3_5,
        harmless=_QWEN3_5_HARMLESS,
        defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
        renamed=_DELTA_NETS,
        **_QWEN3_5,
    ),
    "smollm3": HfFamily(
        fields=SMOLLM3, window_has_switch=True, defaults={"rope_theta": 2e6, "tie_word_embeddings": True}
    ),
}


def hf_family(where: str, config: Mapping[str, Any]) -> HfFamily:
    """Return the family of a `config.json`. Raises BuildError if unsupported; `where` names the model."""
    model_type = config.get("model_type")
    if "vision_config" in config:
        raise unsupported(where, f"a vision tower (`{model_type}`)")
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        raise unsupported(where, f"architecture `{model_type}`")
    return HF_FAMILIES[model_type]
