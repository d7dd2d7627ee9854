"""Read what GGUF files of Gemma 4 say about layers with a window and without one, whose heads differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from shortfin_apps.llm.builder.sources.base import Array, unsupported
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.families.family import Config
from shortfin_apps.llm.model.rope import ProportionalScaling, Rope
from shortfin_apps.llm.model.shared_attention import SharedAttention
from shortfin_apps.llm.model.spec import ModelSpec

# Keys without the prefix `ARCHITECTURE.` that only these files have, or have in another way than others.
GEMMA4_KEYS: Final = frozenset(
    {
        *("attention.key_length", "attention.value_length", "rope.dimension_count"),
        *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
        *("attention.head_count_kv", "attention.sliding_window_pattern", "attention.shared_kv_layers"),
        *("feed_forward_length", "embedding_length_per_layer_input", "expert_used_count"),
    }
)
_PER_LAYER = "per_layer_token_embd.weight"
_NOT_ROTATED = 1e30  # the divisor of frequencies that are 0


def gemma4_fields(
    where: str, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return fields of a Config from GEMMA4_KEYS. Raises BuildError."""
    windows = keys.get("attention.sliding_window_pattern")
    count = keys.get("block_count")
    if not isinstance(windows, list) or len(windows) != count:
        raise BuildError(f"{where}: key `gemma4.attention.sliding_window_pattern` has no item for each layer")
    heads = _of_layers(where, keys, "attention.head_count_kv", windows)
    widths = _of_layers(where, keys, "feed_forward_length", windows)
    shared, features = keys.get("attention.shared_kv_layers", 0), min(widths)
    expected = [features * (1 + (max(widths) > features and n >= count - shared)) for n in range(count)]
    if widths != expected:
        raise unsupported(where, "a model whose layers differ in `feed_forward_length`")
    full = [number for number, has_window in enumerate(windows) if not has_window]
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
        "head_dim": keys.get("attention.key_length_swa"),
        "global_head_dim": keys.get("attention.key_length"),
        "num_key_value_heads": _same(where, [n for n, each in zip(heads, windows, strict=True) if each])
        or heads[0],
        "num_global_key_value_heads": _same(where, [heads[number] for number in full]),
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in shapes,
        "num_kv_shared_layers": shared,
        "intermediate_size": features,
        "use_double_wide_mlp": max(widths) > features,
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": shapes[_PER_LAYER][0] if _PER_LAYER in shapes else None,
        "enable_moe_block": bool(keys.get("expert_count")),
        "top_k_experts": keys.get("expert_used_count"),
    }


def gemma4_ropes(where: str, config: Config, factors: Array | None) -> tuple[Rope, Rope]:
    """Return the RoPE of layers without a window, and the RoPE of layers with a window.

    `factors`: divisors of the frequencies of layers without a window, 1 for frequencies that are kept.
    """
    if factors is None:
        raise BuildError(f"{where}: tensor `rope_freqs.weight` is missing")
    kept = int((factors == 1).sum())
    if len(factors) != config.full_head_size // 2 or not (factors[kept:] >= np.float32(_NOT_ROTATED)).all():
        raise unsupported(where, "a `rope_freqs.weight` that does not keep the first frequencies")
    whole = Rope(theta=config.rope_theta or 1e6, scaling=ProportionalScaling(kept=kept))
    return whole, Rope(theta=config.rope_local_base_freq or 1e4, name="local")


def is_unread(spec: ModelSpec, name: str) -> bool:
    """Return whether the tensor is of keys or values of a layer that reads those of another one."""
    prefix, _, kind = name.partition(".attn_")
    if kind.partition(".")[0] not in ("k", "v", "k_norm"):
        return False
    layers = range(len(spec.layers))
    return any(prefix == f"blk.{n}" and isinstance(spec.layers[n][0], SharedAttention) for n in layers)


def _of_layers(where: str, keys: Mapping[str, Any], key: str, layers: Collection[object]) -> list[int]:
    """Return the key's value for each layer: the items of an array, or one number for all."""
    value = keys.get(key)
    if isinstance(value, int):
        return [value] * len(layers)
    if not isinstance(value, list) or len(value) != len(layers):
        raise BuildError(f"{where}: key `gemma4.{key}` has no item for each layer")
    return value


def _same(where: str, heads: list[int]) -> int | None:
    """Return the number of heads of layers of one kind; None if there are no such layers."""
    if len(set(heads)) > 1:
        raise unsupported(where, "a model whose layers of a kind differ in `attention.head_count_kv`")
    return heads[0] if heads else None
