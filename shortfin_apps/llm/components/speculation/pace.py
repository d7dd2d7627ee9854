"""Pace: whether steps with proposals yield tokens faster than steps without, as measured while serving.

The costs of rows and draft rounds (acceptance.py) are those of single invocations. A step with proposals is
also planned only when the tokens of the last one are known, so the device waits for the host. How long it
waits depends on the model, the machine and the number of requests. Therefore both kinds of steps are timed:

    propose, 32 steps    do not, 12 steps    the faster of both, 1,024 steps    the other one again    ...

The times are of decodes alone. Each range of numbers of requests (1, 2 and 3, 4 to 7, ...) has its own pace.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

# Steps of a trial. The number of accepted tokens varies from step to step; the time of a decode hardly does.
TRIALS: Final = {True: 32, False: 12}
HELD: Final = 1024  # steps of the faster kind until the other one is tried again
UNTIMED: Final = 2  # first steps after a change, which may have been queued before it
_FORGETTING = 1 / 64  # weight of a new step in the moving sums


@dataclass(slots=True)
class _Speed:
    """Moving sums of seconds and tokens."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds - _FORGETTING * self.seconds
        self.tokens += tokens - _FORGETTING * self.tokens

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


class Pace:
    """Chooses between steps with proposals and steps without, for one range of numbers of requests."""

    def __init__(self) -> None:
        self.proposes = True
        self._is_trial = True
        self._steps = 0  # since the last change
        self._speeds = {True: _Speed(), False: _Speed()}

    def observe(self, seconds: float, tokens: int) -> None:
        """Record a step of decodes that took `seconds` and yielded `tokens`; maybe change `proposes`."""
        self._steps += 1
        if self._steps > UNTIMED:
            self._speeds[self.proposes].add(seconds, tokens)
        if self._steps < (TRIALS[self.proposes] if self._is_trial else HELD):
            return
        other = not self.proposes
        if self._is_trial and self._speeds[other].tokens:
            self._choose()
        elif self._speeds[self.proposes].seconds_per_token:  # otherwise nothing is measured
            self._speeds[other] = _Speed()
            self._change(other, is_trial=True)

    def _choose(self) -> None:
        """Hold the faster kind of steps."""
        proposing, plain = (self._speeds[kind].seconds_per_token for kind in (True, False))
        logger.debug("a token takes %.3f ms with proposals, %.3f without", 1e3 * proposing, 1e3 * plain)
        self._change(proposing <= plain, is_trial=False)

    def _change(self, proposes: bool, *, is_trial: bool) -> None:
        if proposes != self.proposes:
            self._steps = 0
        else:
            self._steps = UNTIMED
        self.proposes, self._is_trial = proposes, is_trial


class Paces:
    """The pace of each range of numbers of requests."""

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def of(self, num_requests: int) -> Pace:
        """Return the pace of so many decodes in a step."""
        return self._paces.setdefault(num_requests.bit_length(), Pace())
