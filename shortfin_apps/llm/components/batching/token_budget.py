"""How many tokens one invocation may compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most tokens in one invocation: `beside_streams` while somebody decodes, else `alone`.

    The later in a prompt a token is, the more attention it takes. So that this does not stretch the time that
    streams wait, a page beside them takes 1 + context / `context_span` pages of the budget, where the span is
    the context, in tokens, whose attention takes a token about as long as all the rest of the model. Alone, a
    page is a page.
    """

    beside_streams: int
    alone: int
    context_span: int

    def tokens(self, has_streams: bool) -> int:
        return self.beside_streams if has_streams else self.alone

    def page_cost(self, context: int, has_streams: bool) -> float:
        """What a page at this context takes of the budget, in pages."""
        return 1 + context / self.context_span if has_streams else 1.0
