"""A draft: the tokens proposed for one request's output, ahead of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 8
MAX_FORCED_TOKENS = 32
# Of a row beside reading the weights (acceptance.py), as measured (bench/README.md): on a CPU with SmolLM2,
# on an H200 by what an extend of 64 rows takes longer than a decode of one: 1.0 % a row with an 8B model in
# bf16, 1.6 % in fp8, 2.4 % in q4, and 1.2 % with SmolLM2.
CPU_ROW_COST = 0.075
GPU_ROW_COST = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """The most tokens that are proposed for a request at once, 0 for none; `row_cost` is as in acceptance.py.

    `max_tokens` of prompt lookup, `max_forced_tokens` where a grammar forces them.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    max_forced_tokens: int = MAX_FORCED_TOKENS
    row_cost: float = CPU_ROW_COST


class Proposer(ABC):
    """A source of proposals for one request, which learns how often they are right.

    Its memory is bounded, and it may be dropped at any time: another one proposes as well.
    """

    @abstractmethod
    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        """How many tokens, up to `most`, to propose: each is right with a probability above `least`."""

    @abstractmethod
    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """The `num_worth` tokens that may follow `token_ids`, the prompt and output so far."""

    @abstractmethod
    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """What became of the first `num_proposed` tokens of the last proposal."""


class Draft:
    """Proposes for one request by the first of its proposers that has something to propose."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers
        self._last: Proposer | None = None  # who made the last proposal

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
        """What became of the last proposal."""
        assert self._last is not None, "nothing was proposed"
        self._last.observe(num_proposed, num_accepted)
