"""Weights: unnormalised probabilities as integers, and the filters' thresholds in the same units.

The arithmetic follows `sampling_rule.py`, so that sampling on the device gives the same tokens.
"""

from __future__ import annotations

import math

import numpy as np

from shortfin_apps.llm.components.sampling.candidates import Floats, Ints
from shortfin_apps.llm.contract.sampling_rule import (
    FRACTION_BITS,
    LOWEST_EXPONENT,
    POLYNOMIAL,
    POLYNOMIAL_BITS,
    SHARE_BITS,
    WEIGHT_BITS,
)

_LARGEST = float(np.finfo(np.float32).max)
PART = 1 << 14  # logits per weight computation: its temporaries fit a core's cache


def weights_of(logits: Floats, best: float, scale: np.float32) -> Ints:
    """Return the i64 weights of `logits`; `best` is the greatest logit. The weight of NaN is undefined."""
    with np.errstate(over="ignore"):  # minus infinity gives weight 0, the correct limit
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


def weights_of_row(logits: Floats, best: float, scale: np.float32) -> Ints:
    """Return the same as `weights_of`, part by part, which is faster for many logits."""
    weights = np.empty(len(logits), np.int64)
    for start in range(0, len(logits), PART):
        part = slice(start, start + PART)
        weights[part] = weights_of(logits[part], best, scale)
    return weights


def scale_of(temperature: float) -> np.float32:
    """Return the factor that converts logits to exponents of weights, at most the greatest f32."""
    return np.float32(min(math.log2(math.e) * (1 << FRACTION_BITS) / temperature, _LARGEST))


def share_of(top_p: float) -> int:
    """Return `top_p` in units of 2**-SHARE_BITS, rounded down."""
    return int(top_p * (1 << SHARE_BITS))


def mass_within(share: int, mass: int) -> int:
    """Return `share` (from `share_of`) of the total weight `mass`, the limit of top-p.

    A token fails top-p if the weights of all heavier tokens sum to at least this limit.
    """
    return mass * share >> SHARE_BITS


def least_weight(min_p: float) -> int:
    """Return the smallest weight that passes min-p."""
    return math.ceil(min_p * (1 << WEIGHT_BITS))
