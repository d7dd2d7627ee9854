"""Snapshots of an engine, and the invocations between them. Nothing is kept without a connected viewer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.snapshot import InvocationMix, Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts
from shortfin_apps.llm.contract.abi import EntryClass

MAX_INVOCATIONS = 1024
LOOK_S = 5.0  # invocations are recorded for this long after a snapshot


class EngineWatch:
    """Takes snapshots and records invocation mixes, on the engine's thread between steps.

    A step's work is derived from the counters before and after the step, so the step itself costs no more.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._engine = engine
        self._cpu_clock = cpu_clock
        self._clock = clock
        self._invocations: deque[InvocationMix] = deque(maxlen=MAX_INVOCATIONS)
        self._num_steps = 0  # recorded steps
        self._looked_s = 0.0
        self.is_on = False  # a snapshot was taken within LOOK_S; `note` must then be called after each turn

    def look(self, after: int) -> Snapshot:
        """Take a snapshot of the engine, with the kept invocations of the steps numbered above `after`."""
        at_s, began_s = self._clock(), self._cpu_clock()
        self._looked_s = at_s
        self.is_on = True
        invocations = tuple(mix for mix in self._invocations if mix.serial > after)
        snapshot = self._engine.snapshot(at_s)
        return replace(snapshot, invocations=invocations, taken_s=self._cpu_clock() - began_s)

    def note(self, before: EngineStats, after: EngineStats) -> None:
        """Record the invocations of a turn, given the counters before and after that turn."""
        now_s = self._clock()
        if now_s - self._looked_s > LOOK_S:
            self.is_on = False
            self._invocations.clear()
            return
        duration_s = after.step_s - before.step_s
        mixes = [
            mix
            for name, counts in after.entries.items()
            if counts is not (old := before.entries.get(name))  # counts are copied when they change
            and (mix := _mix(self._num_steps + 1, now_s, duration_s, name, old, counts)) is not None
        ]
        self._num_steps += bool(mixes)
        self._invocations += mixes


def _mix(
    serial: int, at_s: float, duration_s: float, name: str, before: EntryCounts | None, after: EntryCounts
) -> InvocationMix | None:
    """Return the tokens that an entry computed between two counts; None for entries that compute none."""
    if after.entry_class is EntryClass.ROWS:
        return None
    before = before or EntryCounts(after.entry_class)
    return InvocationMix(
        serial=serial,
        at_s=at_s,
        duration_s=duration_s,
        entry=name,
        entry_class=after.entry_class,
        prefill_tokens=after.prefill_tokens.total - before.prefill_tokens.total,
        decode_tokens=after.decode_tokens.total - before.decode_tokens.total,
        padded_tokens=after.padded_tokens - before.padded_tokens,
    )
