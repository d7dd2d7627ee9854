"""Draw: the last step of sampling, which picks one of the remaining tokens.

A draw depends only on the request's seed and the token's index in its output. There is no other state, so a
seed gives the same tokens for any batch composition and after a preemption.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Ints

NOT_FINITE = "the model returned logits that are not finite numbers"
BLOCK = 128  # weights are summed by block, then one block is searched: a full running sum is much slower


def draw(weights: Ints, seed: int, index: int, attempt: int = 0) -> int:
    """Draws a position in `weights`, with probability proportional to its weight; some must not be 0."""
    before = sums_before_blocks(weights)
    target = random_word(seed, index, attempt) * int(before[-1]) >> 64
    return place_in(weights, before, target)[0]


def sums_before_blocks(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the sum of all weights before each BLOCK, and finally the total, in the weights' dtype."""
    before = np.zeros(-(-len(weights) // BLOCK) + 1, weights.dtype)
    np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)), out=before[1:])
    return before


def place_in(weights: npt.NDArray[Any], before: npt.NDArray[Any], target: float) -> tuple[int, float]:
    """Returns the position of the weight that contains `target` on the cumulative scale, and its start.

    `before` comes from `sums_before_blocks`; `target` is at least 0 and less than its last element.
    """
    block = int(np.searchsorted(before, target, side="right")) - 1
    first = block * BLOCK
    ends = before[block] + np.cumsum(weights[first : first + BLOCK])
    place = int(np.searchsorted(ends[:-1], target, side="right"))  # float sums may end before the target
    return first + place, ends[place] - weights[first + place]


def random_word(seed: int, index: int, attempt: int = 0) -> int:
    """Returns 64 random bits that depend only on the arguments, as `sampling_rule.py` specifies."""
    return int(np.random.Philox(key=seed, counter=index + (attempt << 64)).random_raw())
