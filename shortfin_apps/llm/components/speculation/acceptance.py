"""Acceptance: how likely the model is to choose a proposed token, and how many tokens to propose.

An invocation costs 1 for reading the weights, and `row_cost` for each of its token rows. A proposed token
that is accepted with probability q adds q output tokens at the cost of one more row. This pays if q /
row_cost exceeds the output tokens per cost of the invocation without the proposal. With D decodes among R
rows, that is

    q > row_cost * D / (1 + row_cost * R)

If a draft model proposes the token, the token costs round_cost / N more: one invocation of the draft model (a
round) costs `round_cost`, and drafts one token for each of N requests.

The n-th proposed token is accepted with probability rate^n. For prompt lookup, the rate depends on the
match's length: long matches are right more often than short ones. Rates come from the request's own recent
proposals.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

# Bins of match length: 2 tokens, 3, 4 to 7, 8 to 15, 16 and more; and the rate of each before any
# observation.
_LONGER_FROM: Final = (3, 4, 8, 16)
_PRIORS: Final = (0.1, 0.2, 0.5, 0.7, 0.9)
_WEIGHT = 1 / 8  # of a new observation in the moving average
_FORGETTING = 1 / 128  # decay to the prior per match without a proposal, so that a low rate is tried again


def least_chance(row_cost: float, num_decodes: int, num_rows: int, drafting_cost: float = 0.0) -> float:
    """Return the lowest acceptance probability at which one more proposed token pays.

    `num_decodes` and `num_rows` describe the invocation without the token. `drafting_cost` is the draft
    model's cost for the token, relative to reading the weights.
    """
    return (row_cost + drafting_cost) * num_decodes / (1 + row_cost * num_rows)


class Rate:
    """A moving average of the probability that a proposed token is right if all tokens before it are right.

    Starts at `value` (default: `prior`), and decays to `prior` while nothing is proposed.
    """

    def __init__(self, prior: float, value: float | None = None) -> None:
        self._prior = prior
        self.value = prior if value is None else value

    def num_worth(self, least: float, most: int) -> int:
        """Return how many tokens, up to `most`, would each be accepted with a probability above `least`."""
        count, chance = 0, self.value
        while count < most and chance > least:
            count += 1
            chance *= self.value
        return count

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Update with a proposal: `num_accepted` tokens were right, and the next one, if any, was wrong."""
        self.value = 1 - (1 - self.value) * (1 - _WEIGHT) ** num_accepted
        if num_accepted < num_proposed:
            self.value *= 1 - _WEIGHT

    def pass_over(self) -> None:
        """Move the rate towards its prior, after a match for which nothing was proposed."""
        self.value += (self._prior - self.value) * _FORGETTING


class Acceptance:
    """Acceptance rates of one request's matches, by match length."""

    def __init__(self) -> None:
        self._rates = [Rate(prior) for prior in _PRIORS]

    def rate(self, match_length: int) -> float:
        """Return the probability that a token proposed by such a match is right if all earlier ones are."""
        return self._of(match_length).value

    def num_worth(self, match_length: int, least: float, most: int) -> int:
        """Return how many tokens, up to `most`, would each be accepted with a probability above `least`."""
        return self._of(match_length).num_worth(least, most)

    def observe(self, match_length: int, num_proposed: int, num_accepted: int) -> None:
        """Update with a proposal: `num_accepted` tokens were right, and the next one, if any, was wrong."""
        self._of(match_length).observe(num_proposed, num_accepted)

    def pass_over(self, match_length: int) -> None:
        """Record a match of this length for which nothing was proposed."""
        self._of(match_length).pass_over()

    def _of(self, match_length: int) -> Rate:
        return self._rates[bisect_right(_LONGER_FROM, match_length)]
