"""The rotary embedding (RoPE), and its scalings, which extend a model to longer contexts.

`scaled` of each scaling converts the frequencies [rotated / 2] f64, in radians per position. `theta` is their
base, `context` the maximum number of positions that the program is compiled for. Cosines and sines are
multiplied by the scaling's `magnitude`, so attention scores are multiplied by its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Divides all frequencies by `factor` (Hugging Face's `rope_type: linear`)."""

    factor: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Divides low frequencies by `factor`, keeps high ones, interpolates between (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def magnitude(self) -> float:
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blended(frequencies, self.factor, blend)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, `rope_type: yarn`): like Llama3Scaling, but linear in the frequency index.

    Frequencies with at least `beta_fast` rotations within the original context are kept, and those with at
    most `beta_slow` are divided by `factor`. `truncate`: the indices of these two bounds are rounded outwards
    to integers.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        count = len(frequencies)
        first, last = (self._index(turns, count, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        slowed = (np.arange(count, dtype=np.float64) - first) / (last - first or 0.001)
        return _blended(frequencies, self.factor, 1 - slowed)

    def _index(self, turns: float, count: int, theta: float) -> float:
        """Return the fractional index, among `count` frequencies, of the one with `turns` rotations.

        Rotations are counted within the original context.
        """
        wavelength = self.original_max_position_embeddings / turns
        return count * math.log(wavelength / (2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency is divided by its own factor.

    A program uses `short_factors` if its maximum context is within the original one, otherwise
    `long_factors`. Transformers instead switches to the long factors once a sequence exceeds the original
    context, which would invalidate the keys already in the cache.
    """

    short_factors: tuple[float, ...]  # [rotated / 2]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        is_long = context > self.original_max_position_embeddings
        factors = np.array(self.long_factors if is_long else self.short_factors, np.float64)
        slowed: Frequencies = frequencies / factors
        return slowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Keeps the first `kept` frequencies, and sets the others to 0 (`rope_type: proportional`)."""

    kept: int

    @property
    def magnitude(self) -> float:
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        return np.where(np.arange(len(frequencies)) < self.kept, frequencies, 0.0)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of q and k: base `theta`, then `scaling` of the frequencies."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dim: int | None = None  # elements of a head that rotate; None: all
    name: str = "global"  # of the tables of cosines and sines in the program


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of the heads of q and k; None for `rope`: no element rotates.

    `score_scale` multiplies attention scores: cosines and sines include its square root.
    """

    head_dim: int
    rope: Rope | None
    score_scale: float = 1.0

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return 0 if self.rope is None else self.rope.dim or self.head_dim


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor (the magnitude) for contexts extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's attention factor (the magnitude) for an `original` context extended by `factor`."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _blended(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """Interpolate from `frequencies / factor` (where `kept` <= 0) to `frequencies` (where `kept` >= 1)."""
    share = np.clip(kept, 0.0, 1.0)
    blended: Frequencies = frequencies * (share + (1 - share) / factor)
    return blended
