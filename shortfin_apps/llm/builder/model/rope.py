"""Scalings of the rotary embedding, with which a model was extended to longer contexts.

Each takes the frequencies [rotated / 2] f64, in radians per position, that the base `theta` alone gives, and
the most positions that a program is compiled for, `context`.
Cosines and sines are multiplied by its `magnitude`, and so every score by the square of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.float64]


class Rotation(Enum):
    """How a layer rotates q and k: by the model's base and scaling, by its `local_rope_theta`, or not."""

    GLOBAL = auto()
    LOCAL = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies by `factor` slower (Hugging Face's `rope_type: linear`)."""

    factor: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float, context: int) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths are slowed by `factor`, short ones kept, others blended (`rope_type: llama3`)."""

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
    """YaRN (arXiv:2309.00071, `rope_type: yarn`): as Llama 3's, but blended along the index of a frequency.

    Those that turn `beta_fast` times or more within the original context are kept, those that turn at most
    `beta_slow` times slowed; `truncate` rounds both borders outwards to an index.
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
        """Where a frequency that turns so often would stand among `count` of them."""
        wavelength = self.original_max_position_embeddings / turns
        return count * math.log(wavelength / (2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency is divided by a factor of its own.

    There are two sets of them: `short_factors` while no context can exceed the original one, and else
    `long_factors`. Transformers changes them while a sequence grows, which keys in a cache would not follow.
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


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature for contexts that are longer by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE's temperature for contexts that are longer than the `original` by `factor`."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _blended(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """`frequencies` where `kept` is 1 or more, those slowed by `factor` where it is 0 or less."""
    share = np.clip(kept, 0.0, 1.0)
    blended: Frequencies = frequencies * (share + (1 - share) / factor)
    return blended
