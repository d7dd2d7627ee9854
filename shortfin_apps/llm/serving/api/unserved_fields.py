"""Fields of other servers that this server does not support, by route.

The servers are OpenAI's, Anthropic's, vLLM's, SGLang's and llama.cpp's.
A `REFUSED` field would change the answer, so a request with such a field is refused, unless the value is null
or one of the listed values, which have no effect: clients send defaults such as 1 choice or a penalty of 0.
An `INERT` field does not change the answer: it tunes features that do not exist here, routes or labels the
request, or qualifies a refused field. Inert fields are accepted and reported as ignored.
All fields of the other servers are in `tests/serving/api/field_lists.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

Refused = Mapping[str, tuple[object, ...]]  # field: its values without effect, besides null

LEAVE_OUT = "leave it out"
# What to use instead of a refused field; LEAVE_OUT is the advice for all other refused fields.
INSTEAD = {
    "max_completion_tokens": "use `max_tokens`",
    "n_predict": "use `max_tokens`",
    "n_cmpl": "use `n`",
    "n_probs": "use `logprobs`",
    "repeat_penalty": "use `repetition_penalty`",
    "no_stop_trim": "use `include_stop_str_in_output`",
    "extra_key": "use `cache_salt`",
    "t_max_predict_ms": "use `timeout_s`",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "beam_width": "use `num_beams`",
}

# Sampling.
_SAMPLING: Refused = {
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "adaptive_target": (-1,),
    "min_keep": (0,),
    "samplers": (),
    "watermark": (),
    "watermarking": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}
# Constraints on the output and on its end.
_CONSTRAINTS: Refused = {
    "ebnf_full_assistant": (False,),
    "structural_tag": ("",),
    "guided_whitespace_pattern": (),
    "grammar_lazy": (False,),
    "stop_regex": ([], ""),
    "n_indent": (0,),
    "reasoning_budget_message": ("",),
    "reasoning_budget_start_tag": ("",),
    "reasoning_budget_end_tag": ("",),
    "reasoning_budget_end_tags": ([],),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
}
# Inputs of the model other than the prompt.
_INPUT: Refused = {
    "lora": ([],),
    "lora_path": (),
    "session_params": (),
    "mm_hashes": ([],),
    "extra_key": ("", []),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
}
# Additional fields of the answer.
_OUTPUT: Refused = {
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "verbose": (False,),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "n_probs": (0,),
}
_OPENAI: Refused = {
    **_SAMPLING,
    **_CONSTRAINTS,
    **_INPUT,
    **_OUTPUT,
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "reasoning_control": (False,),
    "no_stop_trim": (False,),
    "n_predict": (),
    "n_cmpl": (1,),
    "t_max_predict_ms": (0, -1),
}
_LLAMA_CPP_TUNING = frozenset(
    {
        *("cache_prompt", "n_cache_reuse", "n_keep", "n_discard", "id_slot", "sse_ping_interval"),
        *("backend_sampling", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        *("speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m"),
        *("speculative.ngram_min_hits", "message_delimiters", "preserved_tokens"),
    }
)
# Each of these qualifies a refused field, and has no effect without that field.
_QUALIFIERS = frozenset(
    {
        *("repeat_last_n", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
        *("grammar_triggers", "grammar_type", "guided_decoding_backend"),
        *("truncation_side", "routed_experts_start_len"),
        *("routed_experts_prompt_start", "parallel_tool_calls"),
        *("parse_tool_calls", "return_flat_raw_top_logprobs_b64", "sampling_logprobs_mode"),
    }
)
# Options for images, audio and video, which are refused, and for routes that do not exist here.
_MEDIA = frozenset(
    {
        *("mm_processor_kwargs", "media_io_kwargs", "images_config", "video_config", "mm_payload"),
        *("use_audio_in_video", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
        *("video_max_dynamic_patch", "return_mm_kwargs", "return_token_offsets", "modalities"),
        *("mm_content_hashes",),
    }
)
_LABELS = frozenset(
    {
        *("store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "request_id", "session_id", "rid"),
        *("custom_labels", "data_parallel_rank", "stream_interval"),
    }
)
_OPENAI_INERT = _LLAMA_CPP_TUNING | _QUALIFIERS | _MEDIA | _LABELS

COMPLETION_REFUSED: Refused = {
    **_OPENAI,
    "prompt_embeds": ([], ""),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "messages": (),
    "tools": ([],),
    "reasoning_effort": (),
    "reasoning_format": ("none", "auto"),
}
COMPLETION_INERT = _OPENAI_INERT | {
    *("tool_choice", "add_generation_prompt", "continue_final_message", "generation_prompt"),
    *("chat_format", "chat_parser"),
}
COMPLETION_INSTEAD = {"messages": "use /v1/chat/completions"}

CHAT_REFUSED: Refused = {
    **_OPENAI,
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "stream_reasoning": (True,),
    "parse_tool_calls": (True,),
    "thinking": (),
    "task": (),
    "echo": (False,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "input_ids": (),
    "prompt": (),
    "reasoning_format": ("none", "auto"),
    "chat_format": (0,),
    "chat_parser": ("",),
    "generation_prompt": ("",),
    "return_prompt_text": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_sampling_mask": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
}
CHAT_INSTEAD = {"prompt": "use /v1/completions"}
CALL_INERT = frozenset(
    {"index", "provider_specific_fields", "extra_content"}
)  # in this order: in streamed deltas, from LiteLLM, from Google
CHAT_INERT = _OPENAI_INERT - CHAT_REFUSED.keys() - {"parallel_tool_calls"}

# Anthropic's `/v1/messages`, plus the sampling fields of other servers.
# Claude Code sends the last of these values, which keeps all reasoning in the conversation.
_NO_EDITS: tuple[object, ...] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
COUNT_TOKENS_REFUSED: Refused = {"context_management": _NO_EDITS, "mcp_servers": ([],)}
COUNT_TOKENS_INERT = frozenset({"cache_control", "speed", "user_profile_id", "workspace_id"})
MESSAGES_REFUSED: Refused = {
    **_OPENAI,
    **COUNT_TOKENS_REFUSED,
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
    "max_completion_tokens": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
}
MESSAGES_INERT = (_OPENAI_INERT | COUNT_TOKENS_INERT) - MESSAGES_REFUSED.keys() - {"metadata"}
MESSAGES_INSTEAD = {
    "parallel_tool_calls": "use `tool_choice.disable_parallel_tool_use`",
    "reasoning_effort": "use `output_config.effort`",
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), "use /v1/chat/completions"),
}
BLOCK_INERT = frozenset({"cache_control"})
TEXT_BLOCK_REFUSED: Refused = {"citations": ([],)}
TOOL_USE_REFUSED: Refused = {"caller": ({"type": "direct"},), "toolset_name": ()}
TOOL_RESULT_REFUSED: Refused = {"toolset_name": ()}
MESSAGES_TOOL_REFUSED: Refused = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
MESSAGES_TOOL_INERT = BLOCK_INERT | {"eager_input_streaming"}

# OpenAI's `/v1/responses`.
RESPONSES_REFUSED: Refused = {
    **_OPENAI,
    "access_programs": (),
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": (
        [],
        ["reasoning.encrypted_content"],
    ),  # reasoning is returned as text, not encrypted
    "max_completion_tokens": (),
    "messages": (),
    "moderation": (),
    "prompt": (),
    "reasoning_effort": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "truncation": ("disabled",),
}
RESPONSES_INERT = (_OPENAI_INERT | {"background_options", "max_tool_calls"}) - {
    *("metadata", "store", "parallel_tool_calls"),
}
RESPONSES_INSTEAD = {
    "background": "leave it out, and read the answer of this request",
    "conversation": "use `previous_response_id`",
    "messages": "use `input`",
    "max_completion_tokens": "use `max_output_tokens`",
    "reasoning_effort": "use `reasoning.effort`",
    "truncation": "leave it out, and send less `input`",
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), "use /v1/chat/completions"),
}
RESPONSES_STREAM_OPTIONS_REFUSED: Refused = {"include_obfuscation": (False,)}
RESPONSES_TEXT_REFUSED: Refused = {"verbosity": ("medium",)}
RESPONSES_REASONING_REFUSED: Refused = {"mode": ("standard",), "context": ("auto",)}
RESPONSES_REASONING_INERT = frozenset({"summary", "generate_summary"})  # reasoning is returned in full
RESPONSES_TOOL_REFUSED: Refused = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "output_schema": (),
    "async": (False,),
}
RESPONSES_CALL_REFUSED: Refused = {"caller": ({"type": "direct"},), "namespace": (), "async": (False,)}
RESPONSES_THOUGHT_REFUSED: Refused = {"encrypted_content": ("",)}
RESPONSES_ITEM_INERT = frozenset(
    {"phase", "prompt_cache_breakpoint", "annotations", "logprobs", "created_by"}
)

STRUCTURED_OUTPUTS_REFUSED: Refused = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_fallback": (False,),
    "disable_additional_properties": (False,),
    "_backend": (),
}
STREAM_OPTIONS_REFUSED: Refused = {"include_obfuscation": (False,)}

SAMPLING_REFUSED: Refused = {
    **_SAMPLING,
    **_CONSTRAINTS,
    "beam_width": (1,),
    "beam_search": (False,),
    "logits_normalization": ("none", "NONE"),
    "token_selection_strategy": (),
}
SAMPLING_INERT = _QUALIFIERS | {"stream_interval"}

GENERATE_REFUSED: Refused = {
    **_INPUT,
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "input_embeds": (),
    "lora_id": (),
    "custom_logit_processor": (),
    "watermark": (),
    "positional_embed_overrides": (),
    "token_indices_to_pool": (),
    "multi_item_delimiter_indices": (),
    "token_ids_logprob": ([],),
    "return_sampling_mask": (False, []),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_indexer_topk": (False,),
    "return_prompt_token_ids": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "background": (False,),
    "require_reasoning": (False,),
    "max_thinking_tokens": (-1,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}
GENERATE_INERT = (_MEDIA | {"routed_experts_start_len", "return_flat_raw_top_logprobs_b64"}) | {
    *("sampling_logprobs_mode", "session_id", "conversation_id", "routing_key", "custom_labels"),
    *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "bootstrap_pair_key"),
    *("decode_tp_size", "kv_hints", "log_metrics", "no_logs", "external_trace_header", "received_time"),
    *("http_worker_ipc", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "is_single"),
}

ABORT_REFUSED: Refused = {"abort_all": (False,)}
ABORT_INERT = frozenset({"finished_reason", "abort_message", "weight_versions", "http_worker_ipc"})

TOKENIZE_REFUSED: Refused = {
    "chat_template": (),
    "continue_final_message": (False,),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": (),
    "content": (),
    "add_special": (True,),
    "parse_special": (True,),
    "with_pieces": (False,),
}
TOKENIZE_INERT = frozenset({"media_io_kwargs", "mm_processor_kwargs"})

DETOKENIZE_REFUSED: Refused = {"skip_special_tokens": (False,)}
