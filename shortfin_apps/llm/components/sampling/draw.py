"""Draw: the last step of sampling, which picks one of the tokens that are left.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed gives the same tokens whatever else is in the batch and after a preemption.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.sampling.candidates import Ints

NOT_FINITE = "the model returned logits that are not finite numbers"
BLOCK = 128  # weights that are summed before one is looked for: running sums of all of them take much longer


def draw(weights: Ints, seed: int, index: int, attempt: int = 0) -> int:
    """A position in `weights`, each as likely as its weight says; some are not 0."""
    before = sums_before_blocks(weights)
    target = random_word(seed, index, attempt) * int(before[-1]) >> 64
    return place_in(weights, before, target)[0]


def sums_before_blocks(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sum of all weights before each BLOCK of them, and last that of all, in their own type."""
    before = np.zeros(-(-len(weights) // BLOCK) + 1, weights.dtype)
    np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)), out=before[1:])
    return before


def place_in(weights: npt.NDArray[Any], before: npt.NDArray[Any], target: float) -> tuple[int, float]:
    """The position of the weight that holds the `target`, weights being laid end to end, and where it begins.

    `before` is of `sums_before_blocks`; the target is at least 0, and less than the last of these.
    """
    block = int(np.searchsorted(before, target, side="right")) - 1
    first = block * BLOCK
    ends = before[block] + np.cumsum(weights[first : first + BLOCK])
    place = int(np.searchsorted(ends[:-1], target, side="right"))  # sums of floats may end before the target
    return first + place, ends[place] - weights[first + place]


def random_word(seed: int, index: int, attempt: int = 0) -> int:
    """64 random bits that are a function of the arguments, as `sampling_rule.py` says."""
    return int(np.random.Philox(key=seed, counter=index + (attempt << 64)).random_raw())
