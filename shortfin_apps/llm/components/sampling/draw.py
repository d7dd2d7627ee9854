"""Draw: the last step of sampling, which picks one of the tokens that are left.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed gives the same tokens whatever else is in the batch and after a preemption.
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.sampling.candidates import Floats, Ints
from shortfin_apps.llm.errors import InvocationError

NOT_FINITE = "the model returned logits that are not finite numbers"


def draw(token_ids: Ints | None, weights: Floats, seed: int, index: int) -> int:
    """One of `token_ids` (None: of the vocabulary), each as likely as its weight says.

    Raises InvocationError when the weights' sum is not finite: a search in it would end at the last token.
    """
    mass = np.cumsum(weights, dtype=np.float64)
    if not np.isfinite(mass[-1]):
        raise InvocationError(NOT_FINITE)
    position = int(np.searchsorted(mass, uniform(seed, index) * mass[-1], side="right"))
    position = min(position, len(weights) - 1)
    return position if token_ids is None else int(token_ids[position])


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
