"""The delay before a process is restarted."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 1.0
LONGEST_S = 30.0
STABLE_S = 60.0  # a process that ran at least this long counts as healthy


@dataclass(slots=True)
class RestartDelay:
    """Computes the delays before restarts of a process.

    The first restart, and one after a run of at least STABLE_S, has no delay. After each further short run,
    the delay is FIRST_S, doubled up to LONGEST_S.
    """

    _next_s: float = field(default=0.0)

    def after(self, ran_s: float) -> float:
        """Return the seconds to wait before a restart of a process that has ended after `ran_s` seconds."""
        delay_s = 0.0 if ran_s >= STABLE_S else self._next_s
        self._next_s = min(LONGEST_S, max(FIRST_S, 2 * delay_s))
        return delay_s
