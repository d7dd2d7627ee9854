"""Limits on the tokens of one invocation."""

from __future__ import annotations

from dataclasses import dataclass

# A prefill gets more than the `least` budget if more prompt tokens than this wait while requests decode.
LIGHT_BACKLOG_TOKENS = 1024


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens in one invocation: `while_decoding` if any running request decodes, else `idle`.

    With a `least` budget, invocations are smaller while requests decode and few prompt tokens wait. A light
    load then has even gaps between tokens, and a backlog is processed in few steps. Up to
    LIGHT_BACKLOG_TOKENS waiting prompt tokens, the prefill budget is `least`; beyond that it grows with the
    backlog, up to `while_decoding`.

    Attention costs more the longer the context is. To bound the time that decodes wait, a page of prefill
    then costs 1 + context / `context_span` pages of the budget; `context_span` is the context, in tokens, at
    which attention takes as long as the rest of the model. When idle, each page costs one page.

    `Engine.tune` may replace `while_decoding` and `least` by measured values, before the first step.
    """

    while_decoding: int
    idle: int
    context_span: int
    least: int | None = None

    @property
    def most(self) -> int:
        """Maximum tokens in any invocation."""
        return max(self.while_decoding, self.idle)

    def tokens(self, num_decodes: int, backlog_tokens: int) -> int:
        """Maximum tokens of an invocation, given the number of decodes and of uncomputed prompt tokens.

        Decodes that run in the same invocation are added to it, so that they do not reduce the prompts'
        share.
        """
        tokens = self.while_decoding if num_decodes else self.idle
        if num_decodes and self.least is not None:
            shrunk = int(self.least * max(1.0, backlog_tokens / LIGHT_BACKLOG_TOKENS))
            tokens = min(tokens, shrunk + num_decodes)
        return tokens

    def page_cost(self, context: int, *, has_decodes: bool) -> float:
        """Pages of the budget that a page of prefill costs when `context` tokens precede it."""
        return 1 + context / self.context_span if has_decodes else 1.0
