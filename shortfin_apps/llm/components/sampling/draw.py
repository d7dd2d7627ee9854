"""Draw: the last step of sampling, which picks one of the tokens that are left.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed gives the same tokens whatever else is in the batch and after a preemption.
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.sampling.candidates import Ints

NOT_FINITE = "the model returned logits that are not finite numbers"


def draw(weights: Ints, seed: int, index: int, attempt: int = 0) -> int:
    """A position in `weights`, each as likely as its weight says; some are not 0."""
    mass = np.cumsum(weights)
    target = random_word(seed, index, attempt) * int(mass[-1]) >> 64
    return int(np.searchsorted(mass, target, side="right"))


def random_word(seed: int, index: int, attempt: int = 0) -> int:
    """64 random bits that are a function of the arguments, as `sampling_rule.py` says."""
    return int(np.random.Philox(key=seed, counter=index + (attempt << 64)).random_raw())
