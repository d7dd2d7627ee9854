"""Weights: probabilities as integers, and the thresholds of the filters in the same units.

The arithmetic is that of `sampling_rule.py`, by which a device that samples gets the same tokens.
"""

from __future__ import annotations

import math

import numpy as np

from shortfin_apps.llm.components.sampling.candidates import Floats, Ints
from shortfin_apps.llm.sampling_rule import (
    FRACTION_BITS,
    LOWEST_EXPONENT,
    POLYNOMIAL,
    POLYNOMIAL_BITS,
    SHARE_BITS,
    WEIGHT_BITS,
)

_LARGEST = float(np.finfo(np.float32).max)


def weights_of(logits: Floats, best: float, scale: np.float32) -> Ints:
    """The i64 weights of `logits`, of which `best` is the greatest; all but NaN have one."""
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is 0, as it is in the limit
        scaled = (logits.astype(np.float32) - np.float32(best)) * scale
    exponents = np.maximum(scaled, np.float32(LOWEST_EXPONENT)).astype(np.int32)
    fractions = (exponents & ((1 << FRACTION_BITS) - 1)).astype(np.int64)
    weights = np.full(logits.shape, POLYNOMIAL[-1], np.int64)
    for coefficient in POLYNOMIAL[-2::-1]:
        weights *= fractions
        weights >>= FRACTION_BITS
        weights += coefficient
    weights <<= WEIGHT_BITS - POLYNOMIAL_BITS
    weights >>= -(exponents >> FRACTION_BITS)
    return weights


def scale_of(temperature: float) -> np.float32:
    """The factor of logits in the exponent of a weight; the greatest f32 where it would overflow."""
    return np.float32(min(math.log2(math.e) * (1 << FRACTION_BITS) / temperature, _LARGEST))


def share_of(top_p: float) -> int:
    """`top_p` in units of 2**-SHARE_BITS."""
    return int(top_p * (1 << SHARE_BITS))


def mass_within(share: int, mass: int) -> int:
    """That share of the mass: tokens with as much mass before them do not pass top-p."""
    return mass * share >> SHARE_BITS


def least_weight(min_p: float) -> int:
    """The least weight that passes min-p."""
    return math.ceil(min_p * (1 << WEIGHT_BITS))
