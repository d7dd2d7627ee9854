"""Drafts: tokens proposed for one request's output, ahead of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 8
MAX_FORCED_TOKENS = 32
# Cost of a token row relative to reading the weights (acceptance.py), as measured (docs/measurements.md).
# CPU: with SmolLM2. GPU: on an H200, the extra time per row of an extend of 64 rows over a decode of one row,
# which is 1.0 % with an 8B model in bf16, 1.6 % in fp8, 2.4 % in q4, and 1.2 % with SmolLM2.
CPU_ROW_COST = 0.075
GPU_ROW_COST = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How many tokens are proposed for a request at once, at most (0: none).

    `max_tokens` applies to prompt lookup, `max_forced_tokens` to tokens that a grammar forces. `row_cost` is
    the cost of a token row relative to reading the weights (acceptance.py).
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    max_forced_tokens: int = MAX_FORCED_TOKENS
    row_cost: float = CPU_ROW_COST


class Proposer(ABC):
    """A source of proposals for one request, which learns how often its proposals are right.

    A proposer's memory is bounded. Callers may replace it by a new proposer at any time.
    """

    @abstractmethod
    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        """Return how many tokens, up to `most`, would each be right with a probability above `least`."""

    @abstractmethod
    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """Return `num_worth` tokens that are likely to follow `token_ids`, the prompt and output so far."""

    @abstractmethod
    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the last proposal's first `num_proposed` tokens were accepted."""


class Draft:
    """Proposes tokens for one request, from the first of its proposers that has a proposal."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers
        self._last: Proposer | None = None  # source of the last proposal

    def would_propose(self, token_ids: Sequence[int], least: float, most: int) -> bool:
        """Return whether `propose` would return any token."""
        return any(proposer.num_worth(token_ids, least, most) > 0 for proposer in self._proposers)

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """Return up to `most` tokens to follow `token_ids`, each right with a probability above `least`."""
        for proposer in self._proposers:
            if proposed := proposer.propose(token_ids, least, most):
                self._last = proposer
                return proposed
        return []

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the last proposal's first `num_proposed` tokens were accepted."""
        assert self._last is not None, "nothing was proposed"
        self._last.observe(num_proposed, num_accepted)
