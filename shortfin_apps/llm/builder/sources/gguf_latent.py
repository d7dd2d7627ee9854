"""Read what GGUF files say about latent attention and its models, as llama.cpp's architecture `deepseek2`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from shortfin_apps.llm.builder.sources.base import Array
from shortfin_apps.llm.contract.errors import BuildError

# Keys without the prefix `ARCHITECTURE.` that only these models use, or use in another way than others.
LATENT_KEYS: Final = frozenset(
    {
        *("attention.q_lora_rank", "attention.kv_lora_rank"),
        *("attention.key_length_mla", "attention.value_length_mla", "attention.value_length"),
    }
)
_LOG_MULTIPLIER = 0.1  # llama.cpp's converter multiplies `mscale_all_dim` by it for these models only
_EXPANSION, _TO_KEYS, _TO_VALUES = (f".attn_{name}.weight" for name in ("kv_b", "k_b", "v_b"))


def latent_fields(where: str, keys: Mapping[str, Any], _: object = None) -> dict[str, Any]:
    """Return fields of a Config. Raises BuildError.

    Files made since 2025 have the sizes of heads in keys that end in `_mla`, and in the others those of the
    single head of latents.
    """
    lengths = ("attention.key_length", "attention.value_length")
    needed = ("attention.kv_lora_rank", "rope.dimension_count", *lengths)
    if missing := [key for key in needed if not isinstance(keys.get(key), int)]:
        raise BuildError(f"{where}: key `deepseek2.{missing[0]}` is missing, or no number")
    rotated = keys["rope.dimension_count"]
    return {
        "head_dim": rotated,  # of which all elements rotate
        "kv_lora_rank": keys["attention.kv_lora_rank"],
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.get("attention.key_length_mla", keys["attention.key_length"]) - rotated,
        "v_head_dim": keys.get("attention.value_length_mla", keys["attention.value_length"]),
        "mscale_all_dim": keys.get("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_MULTIPLIER,
    }


def with_expansions(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with `attn_kv_b` in place of `attn_k_b` and `attn_v_b`, as newer files have it."""
    joined = dict(shapes)
    for name in _split(shapes):
        (heads, rank, plain), (_, values, _) = joined.pop(name + _TO_KEYS), joined.pop(name + _TO_VALUES)
        joined[name + _EXPANSION] = (heads * (plain + values), rank)
    return joined


def halves_of(name: str) -> tuple[str, str] | None:
    """Return the names of `attn_k_b` and `attn_v_b` for the name of an `attn_kv_b`; None for other names."""
    if not name.endswith(_EXPANSION):
        return None
    layer = name.removesuffix(_EXPANSION)
    return layer + _TO_KEYS, layer + _TO_VALUES


def joined_expansion(to_keys: Array, to_values: Array) -> Array:
    """Return `attn_kv_b` [heads * (plain + values), rank].

    `to_keys` [heads, rank, plain] is transposed; `to_values` is [heads, values, rank].
    """
    both = np.concatenate([to_keys.swapaxes(1, 2), to_values], axis=1)
    return both.reshape(-1, both.shape[2])


def _split(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the prefix `blk.N` of each layer with both matrices of three dimensions."""
    for name, shape in shapes.items():
        layer = name.removesuffix(_TO_KEYS)
        if layer != name and len(shape) == len(shapes.get(layer + _TO_VALUES, ())) == 3:
            yield layer
