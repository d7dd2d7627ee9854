"""Acceptance: how likely a proposed token is to be the one that the model chooses, and how many to propose.

An invocation costs 1 for reading the weights, and `row_cost` for each of its rows. A proposed token that is
accepted with probability q adds q tokens for one row more. So it pays if q / row_cost is more than the tokens
that the invocation yields for its cost anyway: with D decodes among R rows, if

    q > row_cost * D / (1 + row_cost * R)

Where a draft model yields them, each takes its share of a round of that model too: with a round for N
requests, round_cost / N more than `row_cost`.

The n-th proposed token is accepted with probability rate^n, where the rate is that of the match's length:
long matches are right more often than short ones. Rates are those of the request's own last proposals.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

# Matches by length: of 2 tokens, 3, 4 to 7, 8 to 15, 16 and more; and their rates before anything is known.
_LONGER_FROM: Final = (3, 4, 8, 16)
_PRIORS: Final = (0.1, 0.2, 0.5, 0.7, 0.9)
_WEIGHT = 1 / 8  # of an observation
_FORGETTING = 1 / 128  # of each match that nothing is proposed for: a rate is tried again some time


def least_chance(row_cost: float, num_decodes: int, num_rows: int, drafting_cost: float = 0.0) -> float:
    """The probability above which a proposed token pays, in an invocation of `num_rows` rows without it.

    `drafting_cost` is what it takes to find the token, where reading the weights takes 1.
    """
    return (row_cost + drafting_cost) * num_decodes / (1 + row_cost * num_rows)


class Rate:
    """The probability that a token proposed by one kind of match is right, if those before it are.

    It begins with `value`, and comes to `prior`, the default of that, while nothing is proposed.
    """

    def __init__(self, prior: float, value: float | None = None) -> None:
        self._prior = prior
        self.value = prior if value is None else value

    def num_worth(self, least: float, most: int) -> int:
        """How many tokens, up to `most`, are accepted with a probability above `least`."""
        count, chance = 0, self.value
        while count < most and chance > least:
            count += 1
            chance *= self.value
        return count

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """The first `num_accepted` tokens were right, and the next one, if it was proposed, was not."""
        self.value = 1 - (1 - self.value) * (1 - _WEIGHT) ** num_accepted
        if num_accepted < num_proposed:
            self.value *= 1 - _WEIGHT

    def pass_over(self) -> None:
        """Nothing was proposed for a match: what is known of its kind is a little older."""
        self.value += (self._prior - self.value) * _FORGETTING


class Acceptance:
    """The rates of one request's matches, by their length."""

    def __init__(self) -> None:
        self._rates = [Rate(prior) for prior in _PRIORS]

    def rate(self, match_length: int) -> float:
        """The probability that a token proposed by such a match is right, if those before it are."""
        return self._of(match_length).value

    def num_worth(self, match_length: int, least: float, most: int) -> int:
        """How many tokens, up to `most`, are accepted with a probability above `least`."""
        return self._of(match_length).num_worth(least, most)

    def observe(self, match_length: int, num_proposed: int, num_accepted: int) -> None:
        """The first `num_accepted` tokens were right, and the next one, if it was proposed, was not."""
        self._of(match_length).observe(num_proposed, num_accepted)

    def pass_over(self, match_length: int) -> None:
        """Nothing was proposed for such a match."""
        self._of(match_length).pass_over()

    def _of(self, match_length: int) -> Rate:
        return self._rates[bisect_right(_LONGER_FROM, match_length)]
