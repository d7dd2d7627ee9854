"""Conversations with shared prefixes, drawn in advance, so that every policy gets the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """`rate` is the average requests per second and worker, once conversations are under way.

    A conversation belongs to one group. Its prompts start with the group's `prefix_tokens`; each turn adds a
    question to the conversation so far. Questions are lognormal, answers and turns geometric, thinking time
    between an answer and the next question exponential; groups follow Zipf's law with exponent `zipf`.
    """

    rate: float = 2.5
    duration_s: float = 150
    groups: int = 1000
    zipf: float = 1.0
    prefix_tokens: int = 3072
    question_tokens: float = 275
    answer_tokens: float = 250
    turns: float = 5
    think_s: float = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversation c has turns `first_turn[c]` to `first_turn[c + 1]` in the arrays by turn."""

    prefix_tokens: int
    starts_s: Floats  # by conversation
    group: Integers
    first_turn: Integers
    question_tokens: Integers  # by turn
    answer_tokens: Integers
    think_s: Floats  # after the turn


def draw(options: WorkloadOptions, num_workers: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    count = rng.poisson(options.rate * num_workers * options.duration_s / options.turns)
    turns = rng.geometric(1 / options.turns, count)
    total = int(turns.sum())
    shares = np.arange(1, options.groups + 1) ** -options.zipf
    spread = 0.8
    median = options.question_tokens / np.exp(spread**2 / 2)
    return Workload(
        prefix_tokens=options.prefix_tokens,
        starts_s=np.sort(rng.uniform(0, options.duration_s, count)),
        group=rng.choice(options.groups, count, p=shares / shares.sum()).astype(np.int64),
        first_turn=np.concatenate([[0], turns.cumsum()]).astype(np.int64),
        question_tokens=1 + rng.lognormal(np.log(median), spread, total).astype(np.int64),
        answer_tokens=rng.geometric(1 / options.answer_tokens, total).astype(np.int64),
        think_s=rng.exponential(options.think_s, total),
    )
