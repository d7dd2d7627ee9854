"""Scalings of the rotary embedding, which extend a model to longer contexts.

Each takes the frequencies [rotated / 2] f64 of the base `theta`, in radians per position, and the maximum
number of positions that a program is compiled for, `context`. Cosines and sines are multiplied by its
`magnitude`, and so every score by the square of it.
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
    """Divides low frequencies by `factor`, keeps high ones, and blends others (`rope_type: llama3`)."""

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
    """YaRN (arXiv:2309.00071, `rope_type: yarn`): like Llama 3's, but blended along the frequency index.

    Frequencies that turn `beta_fast` times or more within the original context are kept, and ones that turn
    at most `beta_slow` times are divided by `factor`; `truncate` rounds both bounds outwards to an index.
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
        """Return the (fractional) index of a frequency with `turns` turns among `count` frequencies."""
        wavelength = self.original_max_position_embeddings / turns
        return count * math.log(wavelength / (2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency is divided by its own factor.

    `short_factors` apply if no context can exceed the original one, otherwise `long_factors`. Transformers
    switches between them while a sequence grows, which cached keys could not follow.
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


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of q and k by position, at frequencies that are powers of `theta`, after `scaling`."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dim: int | None = None  # elements of a head that rotate; None: all
    name: str = "global"  # of its tables of cosines and sines in the program


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of heads, with the scale of scores, which its cosines and sines include."""

    head_dim: int
    rope: Rope | None
    score_scale: float = 1.0

    @property
    def rotated(self) -> int:
        """Elements of a head that rotate."""
        return 0 if self.rope is None else self.rope.dim or self.head_dim


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention temperature for contexts extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's attention temperature for contexts extended by `factor` from `original`."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _blended(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """Keep `frequencies` where `kept` is 1 or more, divide by `factor` where it is 0 or less, else blend."""
    share = np.clip(kept, 0.0, 1.0)
    blended: Frequencies = frequencies * (share + (1 - share) / factor)
    return blended
