"""A draft: the tokens proposed for one request's output, ahead of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.speculation.acceptance import Acceptance
from shortfin_apps.llm.components.speculation.ngrams import Match, NgramIndex, continuation

DEFAULT_MAX_TOKENS = 8
# Of a row beside reading the weights (acceptance.py), as measured with SmolLM2-135M (bench/README.md).
# That of GPUs is what their tiles suggest, and was not measured.
CPU_ROW_COST = 0.075
GPU_ROW_COST = 1 / 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """At most `max_tokens` are proposed for a request at once; `row_cost` is as in acceptance.py."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    row_cost: float = CPU_ROW_COST


class Draft:
    """Proposes by prompt lookup, as many tokens as have turned out to pay.

    Its memory is bounded (ngrams.py), and it may be dropped at any time: another one proposes as well.
    """

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._acceptance = Acceptance()
        self._match: Match | None = None  # of the last proposal

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        """How many tokens, up to `most`, to propose: each is right with a probability above `least`."""
        self._match = match = self._index.longest_match(token_ids)
        if match is None or most <= 0:
            return 0
        count = self._acceptance.num_worth(match.length, least, most)
        if not count:
            self._acceptance.pass_over(match.length)
        return count

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """The `num_worth` tokens that may follow `token_ids`."""
        count = self.num_worth(token_ids, least, most)
        return [] if self._match is None else continuation(token_ids, self._match.end, count)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """What became of the last proposal."""
        assert self._match is not None, "nothing was proposed"
        self._acceptance.observe(self._match.length, num_proposed, num_accepted)
