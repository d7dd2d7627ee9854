"""Rotary position embedding by definition, case by case as in the papers' code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotation,
    YarnScaling,
)
from shortfin_apps.llm.model.spec import ModelSpec

F32 = npt.NDArray[np.float32]


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    lo, hi = np.split(x, 2, axis=-1)
    return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)


def rotary(spec: ModelSpec, start: int, tokens: int, way: Rotation) -> tuple[F32, F32]:
    """Return cosines and sines, [tokens, 1, head_dim / 2] each, for programs of the maximum context."""
    rotated = spec.rotated_dim or spec.head_dim
    if way is Rotation.LOCAL:
        assert spec.local_rope_theta is not None
        spec = replace(spec, rope_theta=spec.local_rope_theta, rope_scaling=None)
    frequencies = np.zeros(spec.head_dim // 2)
    frequencies[: rotated // 2] = [
        _scaled(spec, i, spec.rope_theta ** (-2 * i / rotated)) for i in range(rotated // 2)
    ]
    if way is Rotation.NONE:
        frequencies[:] = 0
    angles = np.arange(start, start + tokens)[:, None, None] * frequencies
    scaling, magnitudes = spec.rope_scaling, np.full(spec.head_dim // 2, spec.score_scale**0.5)
    if isinstance(scaling, YarnScaling | LongRopeScaling) and way is Rotation.GLOBAL:
        magnitudes[: rotated // 2] *= scaling.attention_factor
    return (magnitudes * np.cos(angles)).astype(np.float32), (magnitudes * np.sin(angles)).astype(np.float32)


def _scaled(spec: ModelSpec, index: int, frequency: float) -> float:
    """Scale a frequency as the model does, case by case as in the papers' code."""
    match spec.rope_scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case Llama3Scaling() as s:
            wavelength = 2 * np.pi / frequency
            if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
                return frequency / s.factor
            if wavelength <= s.original_max_position_embeddings / s.high_freq_factor:
                return frequency
            smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            return (1 - smooth) * frequency / s.factor + smooth * frequency
        case LongRopeScaling() as s:
            is_long = spec.max_position_embeddings > s.original_max_position_embeddings
            return frequency / (s.long_factors if is_long else s.short_factors)[index]
        case YarnScaling() as s:
            dim = spec.rotated_dim or spec.head_dim
            low, high = (
                dim
                * np.log(s.original_max_position_embeddings / (turns * 2 * np.pi))
                / (2 * np.log(spec.rope_theta))
                for turns in (s.beta_fast, s.beta_slow)
            )
            if s.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = min(max((index - low) / (high - low), 0), 1)
            return float(frequency / s.factor * ramp + frequency * (1 - ramp))
