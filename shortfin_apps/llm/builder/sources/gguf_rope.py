"""Read the rotary scaling in a GGUF file: from `rope.scaling.*` keys, or from tensors (Llama 3, LongRoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.sources.base import Array, parse, unsupported
from shortfin_apps.llm.builder.sources.hf_rope import HfRope
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.rope import Llama3Scaling, Rope

# Tensors [rotated / 2] with divisors of the rotary frequencies: Llama 3's, and LongRoPE's two sets.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
_LONGROPE = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}

# GGUF stores Llama 3's divisors, but not the parameters from which they were computed. All published Llama 3
# models use these.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192

# GGUF keys without the prefix `ARCHITECTURE.` -> fields of HfRope. The value 0 means that the field is not
# set, as in llama.cpp.
ROPE_FIELDS: Final = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_KEYS = {field: key for key, field in ROPE_FIELDS.items()}


def ropes(
    where: str, family: Family, config: Config, keys: Mapping[str, Any], factors: Mapping[str, Array]
) -> tuple[Rope, Rope]:
    """Return the RoPE of layers without a window, and the RoPE of layers with a window.

    `factors`: tensor name -> values, for the names in FACTORS that the file has. Raises BuildError if the
    RoPE is not supported.
    """
    size, theta = config.head_size, config.rope_theta or 10000.0
    rotated = config.rotated_dim or size
    if family.gguf.finetuned_rotates and not keys.get("rope.scaling.finetuned", True):
        raise unsupported(where, "a model without rotation")
    if family.gguf.pairs and rotated != size:
        raise unsupported(where, "a rotary embedding of a part of the head")
    if odd := next((n for n, f in factors.items() if f.shape != (rotated // 2,)), None):
        raise unsupported(where, f"a `{odd}` of shape {factors[odd].shape}")
    is_latent = "kv_lora_rank" in family.fields
    mscale = config.mscale_all_dim if is_latent else 1.0  # in all published models with both
    magnitude = {"mscale": mscale, "mscale_all_dim": config.mscale_all_dim}
    scaled = _scaled(where, keys, factors, {"truncate": family.gguf.yarn_truncates, **magnitude})
    scaling = scaled.scaling(where, config.max_position_embeddings, rotated)
    if ROPE_FACTORS in factors:
        if scaling is not None:
            raise unsupported(where, f"a rotary scaling in addition to `{ROPE_FACTORS}`")
        scaling = _llama3_scaling(where, factors[ROPE_FACTORS].astype(np.float64), size, theta)
    rope = local = Rope(theta=theta, scaling=scaling, dim=None if rotated == size else rotated)
    if config.rope_local_base_freq is not None:
        local = Rope(theta=config.rope_local_base_freq, dim=rope.dim, name="local")
    return rope, local


def _scaled(
    where: str, keys: Mapping[str, Any], factors: Mapping[str, Array], yarn: Mapping[str, Any]
) -> HfRope:
    """Return the scaling as fields of a `config.json`; `yarn`: further fields of YaRN."""
    named = {field: keys[key] for key, field in ROPE_FIELDS.items() if keys.get(key)}
    given = parse(where, HfRope, {"rope_type": "linear", **named}, _KEYS)
    factor, attention_factor = given.factor or 1.0, given.attention_factor or 1.0
    if SHORT_FACTORS in factors and LONG_FACTORS in factors and factor == 1:
        lists = {name: factors[tensor].tolist() for name, tensor in _LONGROPE.items()}
        return given.model_copy(
            update={"rope_type": "longrope", "attention_factor": attention_factor, **lists}
        )
    if attention_factor != 1:
        raise unsupported(where, f"a factor of {attention_factor} on the rotation")
    if given.kind not in ("linear", "yarn") and (given.kind, factor) != ("none", 1):
        raise unsupported(where, f"rotary scaling `{given.kind}` by {factor}")
    return HfRope() if factor == 1 else given.model_copy(update={"attention_factor": None, **yarn})


def _llama3_scaling(where: str, factors: Array, head_dim: int, theta: float) -> Llama3Scaling:
    """Return the scaling with `factors` as divisors. Raises BuildError if they are not Llama 3's."""
    scaling = Llama3Scaling(
        factor=round(float(factors.max(initial=1.0)), 4),
        low_freq_factor=LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=LLAMA3_ORIGINAL_CONTEXT,
    )
    expected = rope_factors(scaling, head_dim, theta)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise unsupported(where, f"a `{ROPE_FACTORS}` that does not follow Llama 3's rule")
    return scaling


def rope_factors(scaling: Llama3Scaling, head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """Return the divisors of the rotary frequencies by the scaling, `[head_dim / 2]`."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return np.asarray(frequencies / scaling.scaled(frequencies, theta, LLAMA3_ORIGINAL_CONTEXT))
