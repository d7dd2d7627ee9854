"""Draws from a full row with float weights, where these provably give the same token as integer weights.

Integer weights (`sampling_rule.py`) take numpy six passes of three operations over the row. Float weights
differ from integer weights by at most a known error, and so do their sums and the target of a draw. If the
target is farther than the error from both ends of a token's weight on the cumulative scale, integer weights
give the same token. This holds for most draws; in a row of equally likely tokens, for all but a few in 1,000.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Floats
from shortfin_apps.llm.components.sampling.draw import place_in, random_word, sums_before_blocks
from shortfin_apps.llm.components.sampling.weights import share_of
from shortfin_apps.llm.contract.sampling_rule import FRACTION_BITS, SHARE_BITS, WEIGHT_BITS

# Maximum relative error of a weight, from the rule's polynomial and f64 rounding.
RELATIVE_ERROR = 4e-9
UNIT = 2.0**-WEIGHT_BITS  # the rule rounds weights down to this unit; the best token weighs 1 here
# For weights of at least LEAST_ORDERED, a greater exponent means a greater integer weight, and a float weight
# greater by more than the factor APART. Float weights with equal exponents may differ by a rounding.
LEAST_ORDERED = 2.0**-20
APART = 1 + 1e-8


def draw_quickly(
    logits: Floats, best: float, scale: np.float32, top_p: float, seed: int, index: int
) -> int | None:
    """Draw a token from `logits` [V] with `top_p`, or return None if only integer weights can decide.

    Callers must pass the greatest logit as `best`; it must be finite.
    """
    weights = _estimated_weights(logits, best, scale)
    mass = float(weights.sum())
    error = RELATIVE_ERROR * mass + (len(logits) + 1) * UNIT  # of any sum, and of a draw's target
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
    """Return the index drawn by a 64-bit random `word`, or None if sums off by `error` may give another."""
    before = sums_before_blocks(weights)
    mass = float(before[-1])
    target = word * 2.0**-64 * mass
    if target >= mass:  # by rounding
        return None
    place, begin = place_in(weights, before, target)
    is_certain = begin + 2 * error < target < begin + float(weights[place]) - 2 * error
    return place if is_certain else None


def _estimated_weights(logits: Floats, best: float, scale: np.float32) -> npt.NDArray[np.float64]:
    """Return 2 to the power of the exponents of `sampling_rule.py`, which are computed exactly.

    Weights are not rounded down to a multiple of UNIT, which the rule does.
    """
    with np.errstate(over="ignore"):  # minus infinity gives weight 0, the correct limit
        exponents = (logits.astype(np.float32, copy=False) - np.float32(best)) * scale
    np.trunc(exponents, out=exponents)
    exponents *= np.float32(2.0**-FRACTION_BITS)
    weights = exponents.astype(np.float64)
    with np.errstate(under="ignore"):
        return np.exp2(weights, out=weights)
