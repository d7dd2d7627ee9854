"""Draw: the final step of sampling, which picks one of the remaining tokens at random.

The random number depends only on the request's seed and the token's index in the output. There is no other
state, so a seed gives the same tokens for any batch composition and after a preemption.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Ints

NOT_FINITE = "the model returned logits that are not finite numbers"
BLOCK = 128  # only one block of weights needs a running sum; a running sum of all weights is much slower


def draw(weights: Ints, seed: int, index: int, attempt: int = 0) -> int:
    """Draw an index of `weights` with probability proportional to its weight. Some weight must not be 0."""
    before = sums_before_blocks(weights)
    target = random_word(seed, index, attempt) * int(before[-1]) >> 64
    return place_in(weights, before, target)[0]


def sums_before_blocks(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of all weights before each block of BLOCK weights, then the total, in their dtype."""
    before = np.zeros(-(-len(weights) // BLOCK) + 1, weights.dtype)
    np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)), out=before[1:])
    return before


def place_in(weights: npt.NDArray[Any], before: npt.NDArray[Any], target: float) -> tuple[int, float]:
    """Return the index of the weight that contains `target` on the cumulative scale, and where it begins.

    Callers must pass the result of `sums_before_blocks` as `before`, and a `target` in [0, before[-1]).
    """
    block = int(np.searchsorted(before, target, side="right")) - 1
    first = block * BLOCK
    ends = before[block] + np.cumsum(weights[first : first + BLOCK])
    place = int(np.searchsorted(ends[:-1], target, side="right"))  # float sums may end before the target
    return first + place, ends[place] - weights[first + place]


def random_word(seed: int, index: int, attempt: int = 0) -> int:
    """Return 64 random bits that depend only on the arguments, as `sampling_rule.py` specifies."""
    return int(np.random.Philox(key=seed, counter=index + (attempt << 64)).random_raw())
