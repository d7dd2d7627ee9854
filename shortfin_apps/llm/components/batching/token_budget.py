"""Limits on the tokens of one invocation."""

from __future__ import annotations

from dataclasses import dataclass

# While requests decode, the prefill budget exceeds `least` if more prompt tokens than this are uncomputed.
LIGHT_BACKLOG_TOKENS = 1024


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens in one invocation: `while_decoding` if any running request decodes, else `idle`.

    `least`, if given, is the prefill budget while requests decode and at most LIGHT_BACKLOG_TOKENS prompt
    tokens are uncomputed. With more uncomputed tokens, the prefill budget grows in proportion, up to
    `while_decoding`. Under light load, the gaps between tokens are then even; a backlog takes few steps.

    Attention takes longer with a longer context. To bound the time that decodes wait, a page of prefill costs
    1 + context / `context_span` pages of the budget while requests decode, and one page otherwise.
    `context_span` is the context length, in tokens, at which attention takes as long as the rest of the
    model.

    `Engine.tune` may replace `while_decoding` and `least` by measured values before the first step.
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
        """Return the maximum tokens of an invocation; `backlog_tokens` counts uncomputed prompt tokens.

        `num_decodes` is added to a budget based on `least`, so that decodes in the same invocation do not
        reduce the prompts' share.
        """
        tokens = self.while_decoding if num_decodes else self.idle
        if num_decodes and self.least is not None:
            shrunk = int(self.least * max(1.0, backlog_tokens / LIGHT_BACKLOG_TOKENS))
            tokens = min(tokens, shrunk + num_decodes)
        return tokens

    def page_cost(self, context: int, *, has_decodes: bool) -> float:
        """Return how many pages of the budget one page of prefill costs at position `context`."""
        return 1 + context / self.context_span if has_decodes else 1.0
