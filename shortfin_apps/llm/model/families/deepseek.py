"""Models with latent attention: DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and their variations.

All layers but the first ones have routed experts and a shared one. V3, Moonlight, Kimi K2 and GLM-4.7-Flash
score experts by a sigmoid and choose them with a bias.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.rope import YarnScaling, yarn_attention_factor
from shortfin_apps.llm.model.spec import Layer, ModelSpec


def layer(config: Config, number: int) -> Layer:
    return attention(config), feed_forward(config, number)


def draft_layer(spec: ModelSpec) -> DraftLayer:
    """Return the draft layer, which is like the last layer with routed experts, if there is one."""
    routed = (each for each in reversed(spec.layers) if isinstance(each[-1], MoE))
    return DraftLayer(blocks=next(routed, spec.layers[-1]), keeps_normed=False)


def attention(config: Config) -> LatentAttention:
    return LatentAttention(
        heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotated=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        rope=config.rope,
        query_rank=config.q_lora_rank,
        score_scale=score_scale(config),
        in_pairs=config.rope_interleave,
    )


def score_scale(config: Config) -> float:
    """Return the factor of scores by which contexts extended by YaRN are made up for."""
    scaling = config.rope.scaling
    if not isinstance(scaling, YarnScaling) or not config.mscale_all_dim:
        return 1.0
    return yarn_attention_factor(scaling.factor, config.mscale_all_dim) ** 2


def feed_forward(config: Config, number: int) -> MLP | MoE:
    kinds = config.mlp_layer_types
    is_dense = kinds[number] == "dense" if kinds else number < config.first_k_dense_replace
    return llama.mlp(config) if is_dense else experts(config)


def experts(config: Config) -> MoE:
    features = config.moe_intermediate_size or config.intermediate_size
    return replace(
        llama.experts(config),
        scores=scores(config),
        scale=config.routed_scaling_factor,
        shared=(config.n_shared_experts or 0) * features or None,
        gates_shared=False,
    )


def scores(config: Config) -> ExpertScores | None:
    """Return how experts are scored; None for a softmax without groups."""
    is_sigmoid, method = config.scoring_func == "sigmoid", config.topk_method
    if not is_sigmoid and method == "greedy":
        return None
    has_bias, has_groups = method == "noaux_tc", method != "greedy"
    groups, kept = (config.n_group or 1, config.topk_group or 1) if has_groups else (1, 1)
    if config.expert_count % groups:
        raise ValueError(f"{config.expert_count} experts in {groups} groups")
    return ExpertScores(
        is_sigmoid=is_sigmoid, bias=has_bias, groups=groups, kept_groups=kept, summed=2 if has_bias else 1
    )


# The fields of mixtures of experts, which GLM-4.5 has, too; the last two are of GGUF files.
EXPERTS = {
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob"),
    *("routed_scaling_factor", "first_k_dense_replace", "num_experts", "mtp_num_hidden_layers"),
}
EXPERT_NAMES = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# Of training, of other servers, of code in Python that this module replaces, and of the draft layers;
# `qk_head_dim` repeats other fields.
HARMLESS = (
    llama.ROUTER_TRAINING
    | {"aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "qk_head_dim"}
    | {"num_nextn_predict_layers", "num_mtp_layers"}
)
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}  # defaults

DEEPSEEK2 = Family(
    title="DeepSeek-V2",
    model_type="deepseek_v2",
    architecture="deepseek2",
    layer=layer,
    fields={
        *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *EXPERTS,
        "mscale_all_dim",
    },
    harmless=HARMLESS,
    defaults={
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
        "q_lora_rank": 1536,
    },
    names={
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        **EXPERT_NAMES,
    },
    has_draft_layers=True,
    draft=draft_layer,
    copies_vocabulary=True,
)
DEEPSEEK3 = replace(
    DEEPSEEK2,
    title="DeepSeek-V3, Moonlight",
    model_type="deepseek_v3",
    part_of="kimi_vl",
    in_gguf=False,  # their GGUF files have the architecture of V2's
    fields=DEEPSEEK2.fields | {"rope_interleave"},
    defaults={
        **SIGMOID,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
    },
)
KIMI_K2 = replace(DEEPSEEK3, title="Kimi K2", model_type="kimi_k2", part_of=None)
GLM4_MOE_LITE = replace(
    DEEPSEEK3,
    title="GLM-4.7-Flash",
    model_type="glm4_moe_lite",
    part_of=None,
    fields=DEEPSEEK3.fields | {"mlp_layer_types"},
    defaults={
        **DEEPSEEK3.defaults,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
)
