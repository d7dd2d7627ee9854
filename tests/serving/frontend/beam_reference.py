"""Beam search over the whole vocabulary, without an engine: what the real one is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Logits = Callable[[Sequence[int]], npt.NDArray[np.floating[Any]]]  # context -> [vocab]


class Ranked(NamedTuple):
    score: float
    token_ids: tuple[int, ...]


def reference_search(
    logits: Logits,
    prompt: Sequence[int],
    num_beams: int,
    max_tokens: int,
    *,
    ends: frozenset[int] = frozenset(),
    banned_early: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> list[Ranked]:
    """The best `num_beams`, best first; `banned_early` cannot be among the first `min_tokens` tokens."""
    live, finished = [Ranked(0.0, ())], list[Ranked]()
    for position in range(max_tokens):
        successors = []
        for beam in live:
            for token, logprob in enumerate(log_softmax(logits([*prompt, *beam.token_ids]))):
                if position >= min_tokens or token not in banned_early:
                    successors.append(Ranked(beam.score + logprob, (*beam.token_ids, token)))
        successors.sort(key=lambda s: s.score, reverse=True)
        going = [s for s in successors if s.token_ids[-1] not in ends]
        last = going[num_beams - 1]
        finished += [s for s in successors if s.token_ids[-1] in ends and s.score > last.score]
        live = going[:num_beams]
        if len(finished) >= num_beams:
            break
    else:
        finished += live
    return sorted(finished, key=lambda s: s.score, reverse=True)[:num_beams]


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = wide - np.logaddexp.reduce(wide)
    return result
