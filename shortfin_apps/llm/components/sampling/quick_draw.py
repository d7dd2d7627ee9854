"""Draws from a whole row by weights in floats, wherever these give the token that integers would.

Weights in integers (`sampling_rule.py`) take numpy six passes over the row of three operations. Floats are
within a known error of them, and so are sums, and the place that a draw falls on. Where that is farther from
both ends of a token's weight, integers would give that token, too. Most draws are so; of a row whose tokens
are all as likely, all but some in 1,000.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Floats
from shortfin_apps.llm.components.sampling.draw import place_in, random_word, sums_before_blocks
from shortfin_apps.llm.sampling_rule import FRACTION_BITS, WEIGHT_BITS

# Of a weight: what the polynomial of the rule and roundings of f64 are off by at most.
RELATIVE_ERROR = 4e-9
UNIT = 2.0**-WEIGHT_BITS  # of the rule, which rounds weights down to units; here the best token weighs 1


def draw_quickly(logits: Floats, best: float, scale: np.float32, seed: int, index: int) -> int | None:
    """The token drawn from all of `logits` [V], of which `best` is the greatest and finite.

    None where it takes integers to say.
    """
    weights = _estimated_weights(logits, best, scale)
    before = sums_before_blocks(weights)
    mass = float(before[-1])
    target = random_word(seed, index) * 2.0**-64 * mass
    if target == mass:  # by rounding
        return None
    token_id, begin = place_in(weights, before, target)
    # An end is off by as much as all weights before it, and the target by as much as all, and its rounding.
    error = 2 * (RELATIVE_ERROR * mass + (len(logits) + 1) * UNIT)
    is_certain = begin + error < target < begin + float(weights[token_id]) - error
    return token_id if is_certain else None


def _estimated_weights(logits: Floats, best: float, scale: np.float32) -> npt.NDArray[np.float64]:
    """2 to the power of the rule's exponents, to the bit; what the rule rounds to 0 is not 0 here."""
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is 0, as it is in the limit
        exponents = (logits.astype(np.float32, copy=False) - np.float32(best)) * scale
    np.trunc(exponents, out=exponents)
    exponents *= np.float32(2.0**-FRACTION_BITS)
    weights = exponents.astype(np.float64)
    with np.errstate(under="ignore"):
        return np.exp2(weights, out=weights)
