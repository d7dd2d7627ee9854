"""Random penalties, which depend on how often each token was generated."""

from __future__ import annotations

import random
from typing import Any


def random_penalties(rng: random.Random) -> dict[str, Any]:
    """Some penalties and biases for half of the requests."""
    penalties: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "frequency_penalty": rng.choice([-0.3, 0.5]),
        "presence_penalty": rng.choice([-0.4, 0.7]),
        "logit_bias": tuple((rng.randrange(32), rng.uniform(-3, 3)) for _ in range(4)),
    }
    kept = {name: value for name, value in penalties.items() if rng.random() < 0.5}
    return kept if rng.random() < 0.5 else {}
