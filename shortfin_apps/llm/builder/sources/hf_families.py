"""What a Hugging Face `model_type` implies that `config.json` does not say, or says in fields of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """The differences from Llama, as transformers' classes for the `model_type` have them."""

    qkv_bias: bool = False  # whatever `attention_bias` says
    qk_norm: bool = False
    head_dim: int | None = None  # where `config.json` has none; None: hidden_size / num_attention_heads
    has_fused_tensors: bool = False
    fields: frozenset[str] = frozenset()  # of `config.json`, which Llama refuses unless they are neutral
    harmless: frozenset[str] = frozenset()  # fields that Llama refuses, and that change nothing here
    rope_theta: float = 10000.0  # where `rope_theta` is missing
    ties_embeddings: bool = False  # where `tie_word_embeddings` is missing
    window_has_switch: bool = False  # `sliding_window` counts only with `use_sliding_window`


GRANITE = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"})
SMOLLM3 = frozenset({"no_rope_layers", "no_rope_layer_interval"})

HF_FAMILIES: Mapping[str, HfFamily] = {
    "granite": HfFamily(fields=GRANITE),
    "llama": HfFamily(),
    "mistral": HfFamily(),
    "phi3": HfFamily(
        has_fused_tensors=True,
        fields=frozenset({"partial_rotary_factor"}),
        harmless=frozenset({"auto_map"}),  # code that transformers has by now
    ),
    "qwen2": HfFamily(qkv_bias=True, window_has_switch=True),
    "qwen3": HfFamily(qk_norm=True, head_dim=128, window_has_switch=True),
    "smollm3": HfFamily(fields=SMOLLM3, rope_theta=2e6, ties_embeddings=True, window_has_switch=True),
}
