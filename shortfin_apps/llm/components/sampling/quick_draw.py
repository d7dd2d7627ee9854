"""Draws from a whole row by weights in floats, wherever these give the token that integers would.

Weights in integers (`sampling_rule.py`) take numpy six passes over the row of three operations. Floats are
within a known error of them, and so are sums, and the place that a draw falls on. Where that is farther from
both ends of a token's weight, integers would give that token, too. Most draws are so; of a row whose tokens
are all as likely, all but some in 1,000.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Floats
from shortfin_apps.llm.components.sampling.draw import place_in, random_word, sums_before_blocks
from shortfin_apps.llm.components.sampling.weights import share_of
from shortfin_apps.llm.sampling_rule import FRACTION_BITS, SHARE_BITS, WEIGHT_BITS

# Of a weight: what the polynomial of the rule and roundings of f64 are off by at most.
RELATIVE_ERROR = 4e-9
UNIT = 2.0**-WEIGHT_BITS  # of the rule, which rounds weights down to units; here the best token weighs 1
# From this weight on, integers are ordered as exponents are, and floats of different ones are farther apart
# than `APART`; those of the same exponent may differ by a rounding.
LEAST_ORDERED = 2.0**-20
APART = 1 + 1e-8


def draw_quickly(
    logits: Floats, best: float, scale: np.float32, top_p: float, seed: int, index: int
) -> int | None:
    """The token drawn from all of `logits` [V], of which `best` is the greatest and finite, by `top_p`.

    None where it takes integers to say.
    """
    weights = _estimated_weights(logits, best, scale)
    mass = float(weights.sum())
    error = RELATIVE_ERROR * mass + (len(logits) + 1) * UNIT  # of any sum of them, and roundings of a target
    within = mass * share_of(top_p) / (1 << SHARE_BITS)
    for attempt in count():
        token_id = _certain_place(weights, random_word(seed, index, attempt), error)
        if token_id is None or top_p == 1:
            return token_id
        if (weight := weights[token_id]) < LEAST_ORDERED:
            return None
        weights = np.where(weights > weight * APART, weights, 0)
        heavier = float(weights.sum())
        if abs(heavier - within) <= 2 * error:
            return None
        if heavier < within:
            break
    return token_id


def _certain_place(weights: npt.NDArray[np.float64], word: int, error: float) -> int | None:
    """The position drawn by a `word` of 64 bits; None if sums with such an error might give another."""
    before = sums_before_blocks(weights)
    mass = float(before[-1])
    target = word * 2.0**-64 * mass
    if target >= mass:  # by rounding
        return None
    place, begin = place_in(weights, before, target)
    is_certain = begin + 2 * error < target < begin + float(weights[place]) - 2 * error
    return place if is_certain else None


def _estimated_weights(logits: Floats, best: float, scale: np.float32) -> npt.NDArray[np.float64]:
    """2 to the power of the rule's exponents, to the bit; what the rule rounds to 0 is not 0 here."""
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is 0, as it is in the limit
        exponents = (logits.astype(np.float32, copy=False) - np.float32(best)) * scale
    np.trunc(exponents, out=exponents)
    exponents *= np.float32(2.0**-FRACTION_BITS)
    weights = exponents.astype(np.float64)
    with np.errstate(under="ignore"):
        return np.exp2(weights, out=weights)
