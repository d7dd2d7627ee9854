"""Limits on the tokens of one invocation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InvocationBudget:
    """The most tokens in one invocation; `has_decodes` tells whether running requests wait to decode."""

    tokens: int
    has_decodes: bool
    context_span: int

    def page_cost(self, context: int) -> float:
        """Pages of the budget that a page of prefill takes when `context` tokens precede it."""
        return 1 + context / self.context_span if self.has_decodes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most tokens in one invocation: `while_decoding` if any running request decodes, else `idle`.

    Attention costs more the longer the context is. To bound the time that decodes wait, a page of prefill
    beside them takes 1 + context / `context_span` pages of the budget; `context_span` is the context, in
    tokens, at which attention takes as long as the rest of the model. When idle, each page takes one page.
    """

    while_decoding: int
    idle: int
    context_span: int

    @property
    def most(self) -> int:
        """The most tokens in any invocation."""
        return max(self.while_decoding, self.idle)

    def of_invocation(self, has_decodes: bool) -> InvocationBudget:
        tokens = self.while_decoding if has_decodes else self.idle
        return InvocationBudget(tokens, has_decodes, self.context_span)
