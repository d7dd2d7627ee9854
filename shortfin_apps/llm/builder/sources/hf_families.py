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
    window_has_switch: bool = False  # `sliding_window` counts only with `use_sliding_window`


HF_FAMILIES: Mapping[str, HfFamily] = {
    "llama": HfFamily(),
    "mistral": HfFamily(),
    "qwen2": HfFamily(qkv_bias=True, window_has_switch=True),
    "qwen3": HfFamily(qk_norm=True, head_dim=128, window_has_switch=True),
}
