"""How many tokens one invocation may compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most tokens in one invocation: `while_decoding` while somebody decodes, else `alone`.

    The later in a prompt a token is, the more attention it takes. So that this does not stretch the time that
    streams wait, a page beside them takes 1 + context / `context_span` pages of the budget, where the span is
    the context, in tokens, whose attention takes a token about as long as all the rest of the model. Alone, a
    page is a page.
    """

    while_decoding: int
    alone: int
    context_span: int

    def tokens(self, has_decodes: bool) -> int:
        return self.while_decoding if has_decodes else self.alone

    def page_cost(self, context: int, has_decodes: bool) -> float:
        """What a page at this context takes of the budget, in pages."""
        return 1 + context / self.context_span if has_decodes else 1.0
