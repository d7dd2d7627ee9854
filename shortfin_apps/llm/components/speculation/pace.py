"""Pace: whether steps with proposals yield tokens faster than steps without, as measured while serving.

The costs of rows and draft rounds (acceptance.py) are those of single invocations. A step with proposals is
also planned only when the tokens of the last one are known, so the device waits for the host. How long it
waits depends on the model, the machine and the number of requests. Therefore both kinds of steps are timed:

    16 steps with proposals, 12 without, then the faster kind for 512 steps, then the other one again ...

The times are of decodes alone. While proposals are allowed, a step that has none (nothing to look up, a draft
model that catches up) does not count. Each range of numbers of requests (1, 2 and 3, 4 to 7, ...) has its own
pace.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

# Steps of a trial. The number of accepted tokens varies from step to step; the time of a decode hardly does.
TRIALS: Final = {True: 16, False: 12}
HELD: Final = 512  # steps of the faster kind until the other one is tried again
UNTIMED: Final = 2  # first steps after a change, which may have been queued before it
CLEARLY: Final = 1.03  # how much longer a token must take with proposals for these to end
OUTLIER: Final = 8.0  # a step counts as at most so many times the mean: something else delayed it
_FORGETTING = 1 / 64  # weight of a new step in the moving sums


@dataclass(slots=True)
class _Speed:
    """Moving sums of seconds and tokens over steps."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        if self.seconds:
            seconds = min(seconds, OUTLIER * self.seconds / self.steps)
        self.seconds += seconds - _FORGETTING * self.seconds
        self.tokens += tokens - _FORGETTING * self.tokens
        self.steps += 1 - _FORGETTING * self.steps

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


class Pace:
    """Chooses between steps with proposals and steps without, for one range of numbers of requests.

    `name` is the range, for log lines.
    """

    def __init__(self, name: str = "") -> None:
        self.proposes = True
        self._name = name
        self._held = True  # the kind that was held last
        self._is_trial = True
        self._steps = 0  # since the last change
        self._speeds = {True: _Speed(), False: _Speed()}

    def observe(self, seconds: float, tokens: int, *, has_proposals: bool) -> None:
        """Record a step of decodes that took `seconds` and yielded `tokens`; maybe change `proposes`."""
        if has_proposals != self.proposes:
            return
        self._steps += 1
        if self._steps > UNTIMED:
            self._speeds[self.proposes].add(seconds, tokens)
        self._turn()

    def pass_over(self) -> None:
        """Count a step that tells nothing, such as one with a prompt, so that no choice lasts for ever."""
        if not self._is_trial:
            self._steps += 1
            self._turn()

    def _turn(self) -> None:
        """End a trial or a hold that has lasted long enough."""
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
        self._change(proposing <= CLEARLY * plain, is_trial=False)
        if self.proposes != self._held:
            self._held = self.proposes
            what = "on again" if self._held else "off for a while"
            logger.info(
                "proposals for %s are %s: a token takes %.3f ms with them, and %.3f without",
                *(self._name, what, 1e3 * proposing, 1e3 * plain),
            )

    def _change(self, proposes: bool, *, is_trial: bool) -> None:
        self._steps = 0 if proposes != self.proposes else UNTIMED
        self.proposes, self._is_trial = proposes, is_trial


class Paces:
    """The pace of each range of numbers of requests."""

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def of(self, num_requests: int) -> Pace:
        """Return the pace of so many decodes in a step."""
        bits = num_requests.bit_length()
        if (pace := self._paces.get(bits)) is None:
            least, most = 1 << bits - 1, (1 << bits) - 1
            pace = self._paces[bits] = Pace("1 request" if most == 1 else f"{least} to {most} requests")
        return pace
