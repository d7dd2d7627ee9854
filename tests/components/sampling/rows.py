"""A row of six logits, and tokens sampled from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.sampler import Sampler
from tests.components.engine_fixture import call

LOGITS = np.array([0.5, 3.0, -1.0, 2.0, 2.5, 0.0], np.float32)
SAMPLER = Sampler(frozenset())


def row(logits: np.ndarray = LOGITS, k: int = 6, *, full: bool = False) -> Candidates:
    order = np.argsort(-logits, kind="stable")[:k]
    return Candidates(logits[order], order, logits if full else None)


def draws(count: int, *, full: bool = False, **params: Any) -> np.ndarray:
    request = Request(call("a", [1], max_tokens=count, seed=5, **params))
    tokens = []
    for _ in range(count):
        tokens.append(SAMPLER.sample(row(full=full), request))
        request.token_ids.append(0)
    return np.bincount(tokens, minlength=6) / count


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())
