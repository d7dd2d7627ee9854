"""Limits on the tokens of one invocation."""

from __future__ import annotations

from dataclasses import dataclass

# A backlog is light if it has at most so many uncomputed prompt tokens per decoding request, of which at most
# MAX_LIGHT_DECODES count.
LIGHT_BACKLOG_TOKENS, MAX_LIGHT_DECODES = 128, 8


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens in one invocation: `while_decoding` if any running request decodes, else `idle`.

    `least`, if given, is the prefill budget while requests decode and the backlog is light. With a larger
    backlog, the prefill budget grows in proportion, up to `while_decoding`. Under light load, the gaps
    between tokens are then even; a backlog takes few steps. What is light depends on the number of decodes:
    while few requests decode, few wait for a long step, and a step costs almost as much as with many.

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
        """Return the maximum prompt tokens of an invocation while `num_decodes` requests decode.

        `backlog_tokens` counts uncomputed prompt tokens.
        """
        if not num_decodes:
            return self.idle
        if self.least is None:
            return self.while_decoding
        light_tokens = LIGHT_BACKLOG_TOKENS * min(num_decodes, MAX_LIGHT_DECODES)
        return min(self.while_decoding, int(self.least * max(1.0, backlog_tokens / light_tokens)))

    def page_cost(self, context: int, *, has_decodes: bool) -> float:
        """Return how many pages of the budget one page of prefill costs at position `context`."""
        return 1 + context / self.context_span if has_decodes else 1.0
