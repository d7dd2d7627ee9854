"""Draw: the last step of sampling, which picks one of the tokens that are left.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed gives the same tokens whatever else is in the batch and after a preemption.
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.sampling.candidates import Ints

NOT_FINITE = "the model returned logits that are not finite numbers"


def draw(token_ids: Ints | None, weights: Ints, seed: int, index: int) -> int:
    """One of `token_ids` (None: of the vocabulary), each as likely as its weight says; some are not 0."""
    mass = np.cumsum(weights)
    target = random_word(seed, index) * int(mass[-1]) >> 64
    position = int(np.searchsorted(mass, target, side="right"))
    return position if token_ids is None else int(token_ids[position])


def random_word(seed: int, index: int) -> int:
    """64 random bits that are a function of the arguments, as `sampling_rule.py` says."""
    return int(np.random.Philox(key=seed, counter=index).random_raw())
