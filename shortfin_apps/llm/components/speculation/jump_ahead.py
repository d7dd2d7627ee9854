"""Jump-ahead: proposes the tokens that a request's grammar forces, such as the keys of a JSON schema.

A grammar that forces tokens allows no others, so a proposal is accepted unless the request ends first or
another parameter bans a token. Therefore one acceptance rate is enough; it drops when a proposal was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shortfin_apps.llm.components.request.grammar import GrammarMatcher
from shortfin_apps.llm.components.speculation.acceptance import Rate
from shortfin_apps.llm.components.speculation.draft import Proposer

_PRIOR: Final = 0.99


class JumpAhead(Proposer):
    """Proposes at most `max_tokens` forced tokens at once.

    `matcher` is the request's own grammar matcher, which sampling also uses with the same growing output.
    """

    def __init__(self, matcher: GrammarMatcher, num_prompt_tokens: int, max_tokens: int) -> None:
        self._matcher = matcher
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._rate = Rate(_PRIOR)

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        return len(self.propose(token_ids, least, most))

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        most = min(most, self._max_tokens)
        forced = self._matcher.forced(token_ids[self._num_prompt_tokens :]) if most > 0 else []
        if not forced:
            return []
        count = self._rate.num_worth(least, min(most, len(forced)))
        if not count:
            self._rate.pass_over()
        return list(forced[:count])

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self._rate.observe(num_proposed, num_accepted)
