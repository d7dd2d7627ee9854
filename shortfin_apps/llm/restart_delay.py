"""The delay before a process is restarted."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 1.0
LONGEST_S = 30.0
STABLE_S = 60.0  # a process that ran this long was healthy


@dataclass(slots=True)
class RestartDelay:
    """No delay at first and after a long run, then 1 s, doubled up to 30 s while runs stay short."""

    _next_s: float = field(default=0.0)

    def after(self, ran_s: float) -> float:
        """Returns the seconds to wait, given that the process has just ended after `ran_s` seconds."""
        delay_s = 0.0 if ran_s >= STABLE_S else self._next_s
        self._next_s = min(LONGEST_S, max(FIRST_S, 2 * delay_s))
        return delay_s
