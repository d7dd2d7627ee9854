"""Read and check a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat

from shortfin_apps.llm.builder.sources.base import parse, unsupported
from shortfin_apps.llm.builder.sources.hf_rope import HfRope, query_scaling
from shortfin_apps.llm.builder.sources.known_fields import OFF, ONE, KnownFields, names
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families import OF_MODEL_TYPE, OF_SOME_FAMILIES
from shortfin_apps.llm.model.families.family import SET_BY_READER, Config, Family, Size
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.rope import Rope

ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROPE_KINDS = ("full_attention", "sliding_attention")


class HfFields(BaseModel):
    """The fields of `config.json` that only this module and hf_directory.py need; Config has the others."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    model_type: str
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: PositiveFloat | None = None
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def rope(self) -> HfRope:
        rope = self.rope_parameters or self.rope_scaling or HfRope()
        rope = rope.full_attention or rope
        original = self.original_max_position_embeddings or rope.original_max_position_embeddings
        return rope.model_copy(update={"original_max_position_embeddings": original})


def hf_family(where: str, raw: Mapping[str, Any]) -> Family:
    """Return the family of a text model (`text_config`). Raises BuildError if it is not supported.

    `raw`: the fields of `config.json`; `where` names the model in errors.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in OF_MODEL_TYPE:
        raise unsupported(where, f"architecture `{model_type}`")
    return OF_MODEL_TYPE[model_type]


def read_config(
    where: str, family: Family, raw: Mapping[str, Any], accepted: Collection[str]
) -> tuple[Config, HfFields]:
    """Read the content `raw` of a `config.json`.

    Raises BuildError for invalid fields, and for unsupported or unknown fields that would change the
    computation. `accepted`: unknown fields to ignore.
    """
    file, known = f"{where}/config.json", HF_CONFIG.using(family.fields)
    fields = {**family.defaults, **{name: value for name, value in raw.items() if name in known.used}}
    config, given = parse(file, Config, fields), parse(file, HfFields, fields)
    known.using(family.harmless).check(file, raw, accepted)
    _check_rope(file, family, raw, accepted)
    _check_lists(where, family, config)
    config = _with_full_heads(where, config)
    if config.mlp_bias and config.expert_count:
        raise unsupported(where, "a bias in the feed-forward of a mixture of experts (`mlp_bias`)")
    if config.attention_bias and "kv_lora_rank" in family.fields:
        raise unsupported(where, "a bias in latent attention (`attention_bias`)")
    rope, local_rope = _ropes(file, config, given)
    update: dict[str, Any] = {
        "activation": _activation(where, family, given),
        "output_bias": config.attention_bias,
        "rope": rope,
        "local_rope": local_rope,
        "mscale_all_dim": given.rope.mscale_all_dim,
        "query_scaling": query_scaling(
            file, rope, given.rope.llama_4_scaling_beta or config.llama_4_scaling_beta
        ),
    }
    if family.scales_embedding:  # the factor is rounded to the weights' dtype, as in transformers
        rounded = ROUNDED.get(given.dtype or given.torch_dtype or "float32", np.float32)
        update["embedding_multiplier"] = float(rounded(config.hidden_size**0.5))
    return config.model_copy(update=update), given


def _activation(where: str, family: Family, given: HfFields) -> Activation:
    name = given.hidden_activation or given.hidden_act
    if name not in family.activations:
        raise unsupported(where, f"activation `{name}`")
    return family.activations[name]


def _ropes(file: str, config: Config, given: HfFields) -> tuple[Rope, Rope]:
    """Return the RoPE of layers without a window, and the RoPE of layers with a window."""
    rope, size = given.rope, config.full_head_size
    share = rope.partial_rotary_factor or given.partial_rotary_factor or 1.0
    rotated = size if rope.kind == "proportional" else int(size * share)
    dim = None if rotated == size else rotated
    scaling = rope.scaling(file, config.max_position_embeddings, rotated)
    whole = Rope(theta=rope.rope_theta or config.rope_theta or 10000.0, scaling=scaling, dim=dim)
    local = given.rope_parameters and given.rope_parameters.sliding_attention
    if local and (local.kind != "default" or local.partial_rotary_factor not in (None, 1)):
        raise unsupported(file, f"rotary scaling `{local.kind}` of layers with a window")
    theta = config.rope_local_base_freq
    if local:
        theta = local.rope_theta or theta or config.rope_theta
    return whole, whole if theta is None else Rope(theta=theta, dim=dim, name="local")


def _with_full_heads(where: str, config: Config) -> Config:
    """Return the configuration with the heads of layers without a window, as `per_layer_config` has them."""
    given = config.per_layer_config
    if not given:
        return config
    full = {number for number in range(config.num_hidden_layers) if config.window(number) is None}
    if given.keys() != full or len(set(given.values())) > 1:
        raise unsupported(where, "a `per_layer_config` that differs between layers without a window")
    [fields] = set(given.values())
    heads = {
        "global_head_dim": fields.head_dim or config.head_dim,
        "num_global_key_value_heads": fields.num_key_value_heads,
    }
    return config.model_copy(update=heads)


def _check_lists(where: str, family: Family, config: Config) -> None:
    """Raise BuildError for per-layer lists of the wrong length or with an unsupported item."""
    kinds = {"full_attention", "attention", *(["sliding_attention"] if config.window_size else [])}
    if "full_attention_interval" in family.fields:  # only families with gated delta nets have it
        kinds.add("linear_attention")
    if odd := set(config.layer_types or ()) - kinds:
        raise unsupported(where, f"`layer_types` of `{min(odd)}`")
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        items = getattr(config, name)
        if items and len(items) != config.num_hidden_layers:
            raise BuildError(f"{where}/config.json: `{name}` has not one item for each layer")


def _check_rope(file: str, family: Family, raw: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise BuildError for unsupported fields in `rope_scaling` and `rope_parameters`."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        parts = {f"{name}.{kind}.": rope[kind] for kind in ROPE_KINDS if rope.get(kind)}
        for prefix, fields in {f"{name}.": rope, **parts}.items():
            HF_ROPE.using(family.fields).check(file, fields, accepted, prefix)


# Neutral values of fields with which models differ from Llama (Granite, MiniCPM, Cohere, OLMo, Gemma).
_VARIANTS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), ONE),
    **dict.fromkeys(("scale_emb", "embedding_scale", "residual_scale", "rope_ratio", "mup_scale"), ONE),
    "moe_layer_freq": ONE,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent"), ONE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_soft_cap"), OFF),
    **dict.fromkeys(("clip_qkv", "max_alibi_bias", "attention_chunk_size"), OFF),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), OFF),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "rotary_dim"), ()),
    **dict.fromkeys(("qk_layernorm", "qk_norm", "use_qk_norm", "qkv_bias", "use_bias", "bias"), ()),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "alibi", "rope_interleaved"), ()),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "auto_map", "pruned_heads"), ()),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"), ()),
    "hidden_activation": ("silu",),
    "swiglu_limit": (7.0,),
    "swiglu_alpha": (1.702,),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), (0,)),
    **dict.fromkeys(("vocab_size_per_layer_input", "use_double_wide_mlp"), ()),
    **dict.fromkeys(("enable_moe_block", "top_k_experts", "global_head_dim"), ()),
    **dict.fromkeys(("num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"), ()),
    "use_bidirectional_attention": ("vision",),  # between images
    "sliding_window_pattern": (),
    "rope_local_base_freq": (),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), ONE),
}

_ADVICE = {
    "partial_rotary_factor": "transformers ignores the field in this family, vLLM does not: if the model was "
    "trained without it, delete the field, else give the model as a family that has it",
}

# `used` has the fields that are read for all families. The harmless fields are from transformers'
# `PretrainedConfig` and `LlamaConfig`, and from training and conversion programs.
HF_CONFIG = KnownFields(
    used=frozenset({*Config.model_fields, *HfFields.model_fields}) - SET_BY_READER - OF_SOME_FAMILIES,
    harmless=names(
        # names and provenance
        "architectures name_or_path transformers_version tokenizer_class prefix finetuning_task id2label "
        "label2id num_labels task_specific_params problem_type is_llama_config transformers.js_config "
        # storage, training and execution
        "use_cache return_dict output_hidden_states output_attentions torchscript "
        "use_bfloat16 is_decoder tie_encoder_decoder chunk_size_feed_forward initializer_range "
        "initializer_factor attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop dropout "
        "pretraining_tp gradient_checkpointing attn_implementation use_flash_attn max_sequence_length "
        "max_seq_len model_max_length seq_length multiple_of use_sliding_window "
        "ffn_dim_multiplier unsloth_version unsloth_fixed "
        # token ids and sampling defaults
        "bos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id max_length min_length "
        "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p "
        "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
        "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens"
    ),
    harmless_prefixes=("_",),
    neutral=_VARIANTS,
    advice=_ADVICE,
)

# Fields of `rope_scaling` and `rope_parameters`. `HfRope.scaling` rejects unsupported kinds of scaling.
HF_ROPE = KnownFields(
    used=frozenset(HfRope.model_fields) - {"partial_rotary_factor", "llama_4_scaling_beta"},
    # The sections separate time, height and width of positions in images; for text, all three are equal.
    harmless=names("mrope_section mrope_interleaved max_position_embeddings"),
    neutral={"partial_rotary_factor": ONE, "llama_4_scaling_beta": OFF},
    advice=_ADVICE,
)
