"""Drafts: tokens proposed for one request's output, ahead of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 8
MAX_FORCED_TOKENS = 32
# Cost of a row relative to reading the weights (acceptance.py), as measured (docs/measurements.md): on a CPU
# with SmolLM2; on an H200 as the extra time of an extend of 64 rows over a decode of one: 1.0 % a row with an
# 8B model in bf16, 1.6 % in fp8, 2.4 % in q4, and 1.2 % with SmolLM2.
CPU_ROW_COST = 0.075
GPU_ROW_COST = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Maximum number of tokens proposed for a request at once (0: none), and `row_cost` (acceptance.py).

    `max_tokens` applies to prompt lookup, `max_forced_tokens` to tokens that a grammar forces.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    max_forced_tokens: int = MAX_FORCED_TOKENS
    row_cost: float = CPU_ROW_COST


class Proposer(ABC):
    """A source of proposals for one request, which learns how often they are right.

    Its memory is bounded, and it may be dropped at any time: a new one can replace it.
    """

    @abstractmethod
    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        """Number of tokens to propose, up to `most`: each must be right with a probability above `least`."""

    @abstractmethod
    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """The `num_worth` tokens that may follow `token_ids`, the prompt and output so far."""

    @abstractmethod
    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Record how many of the first `num_proposed` tokens of the last proposal were accepted."""


class Draft:
    """Proposes tokens for one request, from the first of its proposers that has a proposal."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers
        self._last: Proposer | None = None  # source of the last proposal

    def would_propose(self, token_ids: Sequence[int], least: float, most: int) -> bool:
        """Whether `propose` would return any token."""
        return any(proposer.num_worth(token_ids, least, most) > 0 for proposer in self._proposers)

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, each right with a probability above `least`."""
        for proposer in self._proposers:
            if proposed := proposer.propose(token_ids, least, most):
                self._last = proposer
                return proposed
        return []

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Record how much of the last proposal was accepted."""
        assert self._last is not None, "nothing was proposed"
        self._last.observe(num_proposed, num_accepted)
