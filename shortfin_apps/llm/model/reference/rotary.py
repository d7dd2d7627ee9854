"""Rotary position embedding by its definition, as in the papers' code, independently of model/rope.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Rotation,
    YarnScaling,
)

F32 = npt.NDArray[np.float32]


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    lo, hi = np.split(x, 2, axis=-1)
    return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)


def rotary(rotation: Rotation, start: int, tokens: int, max_position_embeddings: int) -> tuple[F32, F32]:
    """Return the cosines and sines, each [tokens, 1, head_dim / 2], for positions from `start` on.

    `max_position_embeddings`: the program's maximum context, which selects LongRoPE's factors.
    """
    rope, rotated, half = rotation.rope or Rope(), rotation.rotated, rotation.head_dim // 2
    frequencies, magnitudes = np.zeros(half), np.full(half, rotation.score_scale**0.5)
    frequencies[: rotated // 2] = [
        _scaled(rope, rotated, i, rope.theta ** (-2 * i / rotated), max_position_embeddings)
        for i in range(rotated // 2)
    ]
    angles = np.arange(start, start + tokens)[:, None, None] * frequencies
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        magnitudes[: rotated // 2] *= rope.scaling.attention_factor
    return (magnitudes * np.cos(angles)).astype(np.float32), (magnitudes * np.sin(angles)).astype(np.float32)


def _scaled(rope: Rope, rotated: int, index: int, frequency: float, max_position_embeddings: int) -> float:
    """Return the scaled `frequency`, which is number `index` of the frequencies of `rotated` elements."""
    match rope.scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case ProportionalScaling(kept=kept):
            return frequency if index < kept else 0.0
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
            is_long = max_position_embeddings > s.original_max_position_embeddings
            return frequency / (s.long_factors if is_long else s.short_factors)[index]
        case YarnScaling() as s:
            low, high = (
                rotated
                * np.log(s.original_max_position_embeddings / (turns * 2 * np.pi))
                / (2 * np.log(rope.theta))
                for turns in (s.beta_fast, s.beta_slow)
            )
            if s.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, rotated - 1)
            ramp = min(max((index - low) / (high - low), 0), 1)
            return float(frequency / s.factor * ramp + frequency * (1 - ramp))
