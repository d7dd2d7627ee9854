"""Tables of known configuration fields, so that no field that changes the computation is silently ignored.

A field is either used by the reader, or harmless (no effect on the computation), or must have one of its
neutral values, which leave the computation unchanged. An unknown field may change the computation in code
that is not known here, so it is only accepted if it is null, false or empty; `build --accept-field` allows
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from shortfin_apps.llm.contract.errors import BuildError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFields:
    """The tables for one configuration object.

    `neutral` lists the accepted values of fields that are otherwise not supported; `harmless_prefixes` cover
    every field that starts with them.
    """

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    harmless_prefixes: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def using(self, names: AbstractSet[str]) -> KnownFields:
        """Return the tables for a reader that also uses `names`."""
        return replace(self, used=self.used | names)

    def check(
        self, where: str, given: Mapping[str, object], accepted: Collection[str] = (), prefix: str = ""
    ) -> None:
        """Raise BuildError for the first field of `given` that would change the computation.

        `accepted` are unknown fields that the user declares harmless; `prefix` is put before names in errors.
        """
        for name, value in given.items():
            if name in self.used or name in self.harmless or name.startswith(self.harmless_prefixes):
                continue
            if _says_nothing(value) or _is_one_of(value, self.neutral.get(name, ())):
                continue
            if name in self.neutral:
                raise BuildError(f"{where}: `{prefix}{name}` is {_short(value)}, which is not supported")
            if prefix + name not in accepted:
                raise BuildError(
                    f"{where}: `{prefix}{name}` is {_short(value)}, and whether that changes the computation "
                    f"is not known here; if it does not, build with `--accept-field {prefix}{name}`"
                )


def _says_nothing(value: object) -> bool:
    """Whether the value is null, false or empty. Zero is not, as a factor of 0 has a meaning."""
    return value is None or value is False or value in ("", [], {})


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    if isinstance(value, float):  # GGUF stores f32
        return any(isinstance(n, float | int) and math.isclose(value, n, rel_tol=1e-6) for n in neutral)
    return value in neutral


def _short(value: object) -> str:
    text = str(value).partition("\n")[0]
    return text if len(text) <= 40 else f"{text[:37]}..."


_OFF = (0, -1)
_ONE = (1,)

# Multipliers and switches of models that are otherwise Llamas (Granite, MiniCPM, Cohere, OLMo, Gemma).
_VARIANTS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), _ONE),
    **dict.fromkeys(("scale_emb", "embedding_scale", "residual_scale", "rope_ratio", "mup_scale"), _ONE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent"), _ONE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_soft_cap"), _OFF),
    **dict.fromkeys(("clip_qkv", "max_alibi_bias", "attention_chunk_size"), _OFF),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _OFF),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "rotary_dim"), ()),
    **dict.fromkeys(("qk_layernorm", "qk_norm", "use_qk_norm", "qkv_bias", "use_bias", "bias"), ()),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "alibi", "rope_interleaved"), ()),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "auto_map", "pruned_heads"), ()),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"), ()),
    "hidden_activation": ("silu",),
    "swiglu_limit": (7.0,),
    "swiglu_alpha": (1.702,),
    "sliding_window_pattern": (),
    "rope_local_base_freq": (),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), _ONE),
}

# `PretrainedConfig` and `LlamaConfig` of transformers, and fields that trainers and converters add.
HF_CONFIG = KnownFields(
    used=_names(
        "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps "
        "rope_theta rope_scaling "
        "rope_parameters tie_word_embeddings sliding_window use_sliding_window max_window_layers layer_types "
        "hidden_act attention_bias mlp_bias quantization_config eos_token_id dtype torch_dtype"
    ),
    harmless=_names(
        # names and provenance
        "architectures name_or_path transformers_version tokenizer_class prefix finetuning_task id2label "
        "label2id num_labels task_specific_params problem_type is_llama_config transformers.js_config "
        # storage, training and execution
        "use_cache return_dict output_hidden_states output_attentions torchscript "
        "use_bfloat16 is_decoder tie_encoder_decoder chunk_size_feed_forward initializer_range "
        "initializer_factor attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop dropout "
        "pretraining_tp gradient_checkpointing attn_implementation use_flash_attn max_sequence_length "
        "max_seq_len model_max_length seq_length multiple_of "
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
)

# `rope_scaling` and `rope_parameters`. Unsupported kinds are rejected earlier, by their type.
HF_ROPE = KnownFields(
    used=_names(
        "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
        "attention_factor mscale mscale_all_dim beta_fast beta_slow truncate short_factor long_factor "
        "full_attention sliding_attention"
    ),
    harmless=_names("mrope_section mrope_interleaved"),  # text has the same position in all three sections
    neutral={"partial_rotary_factor": _ONE},
)

# A GGUF file's keys below its architecture (docs/gguf.md, and `llama_model_loader` of llama.cpp).
GGUF_MODEL = KnownFields(
    used=_names(
        "block_count context_length embedding_length feed_forward_length attention.head_count "
        "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length "
        "attention.value_length attention.sliding_window rope.dimension_count rope.freq_base "
        "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length "
        "rope.scaling.finetuned rope.scaling.attn_factor "
        "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
        "expert_count"
    ),
    # The sections are for positions in images; text has the same position in all of them.
    harmless=_names("vocab_size tensor_data_layout rope.dimension_sections"),
    neutral={
        **dict.fromkeys(
            ("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), (0, 1)
        ),
        "rope.scale_linear": (0, 1),  # older name of a linear scaling's factor
        **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (-1, 1)),
        "rope.scaling.yarn_log_multiplier": (0,),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.scale"), (0,)),
        **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv", "pooling_type"), (0,)),
        **dict.fromkeys(("expert_used_count", "expert_shared_count", "leading_dense_block_count"), (0,)),
        **dict.fromkeys(("expert_shared_feed_forward_length", "expert_feed_forward_length"), (0,)),
        "expert_gating_func": (0, 1),  # softmax, explicitly or by default
        "expert_weights_norm": (True,),  # always true, regardless of the key
        "expert_weights_scale": (0, 1),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
        **dict.fromkeys(("nextn_predict_layers", "interleave_moe_layer_step"), (0,)),
        "attention.causal": (True,),
        "use_parallel_residual": (),
        "attention.sliding_window_pattern": (),
        "rope.freq_base_swa": (),
    },
)

# The only other keys that llama.cpp reads; keys that quantisers add under separate names are harmless.
GGUF_FILE = KnownFields(
    used=frozenset({"general.architecture"}),
    neutral={
        "general.type": ("model",),
        **dict.fromkeys(("adapter.type", "adapter.lora.alpha"), ()),
    },
)

# `tokenizer.*`, without the prefix. llama.cpp uses whitespace and character maps for `t5` only.
GGUF_TOKENIZER = KnownFields(
    used=_names(
        "ggml.model ggml.pre ggml.tokens ggml.token_type ggml.scores ggml.merges ggml.bos_token_id "
        "ggml.eos_token_id ggml.eot_token_id ggml.eom_token_id ggml.unknown_token_id "
        "ggml.seperator_token_id ggml.mask_token_id ggml.cls_token_id "
        "ggml.padding_token_id ggml.add_bos_token ggml.add_eos_token ggml.add_space_prefix "
        "ggml.remove_extra_whitespaces ggml.precompiled_charsmap chat_template"
    ),
    harmless=_names(
        "ggml.token_type_count ggml.prefix_token_id ggml.suffix_token_id ggml.middle_token_id "
        "huggingface.json rwkv.world chat_templates"
    ),
    harmless_prefixes=("ggml.fim_", "chat_template."),
    neutral={"ggml.add_sep_token": ()},
)
