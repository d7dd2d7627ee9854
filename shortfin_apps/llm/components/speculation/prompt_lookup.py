"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a request's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.speculation.acceptance import Acceptance
from shortfin_apps.llm.components.speculation.draft import Proposer
from shortfin_apps.llm.components.speculation.ngrams import Match, NgramIndex, continuation


class PromptLookup(Proposer):
    """Proposes at most `max_tokens` at once, as many as past acceptance justifies."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._index = NgramIndex()
        self._acceptance = Acceptance()
        self._match: Match | None = None  # of the last proposal

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        self._match = match = self._index.longest_match(token_ids)
        most = min(most, self._max_tokens)
        if match is None or most <= 0:
            return 0
        count = self._acceptance.num_worth(match.length, least, most)
        if not count:
            self._acceptance.pass_over(match.length)
        return count

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        count = self.num_worth(token_ids, least, most)
        return [] if self._match is None else continuation(token_ids, self._match.end, count)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        assert self._match is not None, "nothing was proposed"
        self._acceptance.observe(self._match.length, num_proposed, num_accepted)
