"""Invokes again, back to back, what an engine has invoked: the least time that this work takes the device."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from bench.gpu.entries import DEPTH
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, EntrySignature, Pending, Program
from shortfin_apps.llm.contract.abi import EntryFamily, Layout, argument_names

_POSITIONS = argument_names(Layout.LOOP, has_prefill_position=True, has_windows=False).index("positions")


class RecordedTraffic:
    """A program that can record its invocations, with their arguments on the device.

    A decode loop advances its positions in place. `_num_runs` counts how often, by the buffer's `id`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._is_recording = False
        self._recorded: list[tuple[str, list[DeviceBuffer]]] = []
        self._num_runs: Counter[int] = Counter()
        self._first: dict[int, DeviceBuffer] = {}  # positions as of the start, by `id` of the recorded ones

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._program.entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        if self._is_recording:
            self._recorded.append((entry, list(arguments)))
        if self._recorded and _is_loop(entry):
            self._num_runs[id(arguments[_POSITIONS])] += 1
        return self._program.submit(entry, arguments)

    def start(self) -> None:
        """Record invocations from now on. This keeps all their arguments in memory."""
        self._is_recording = True

    def stop(self) -> None:
        """Record no further invocations."""
        self._is_recording = False

    def replay_s(self, device: Device) -> float:
        """Invoke what was recorded, with DEPTH invocations in flight; return the seconds, and forget it.

        Callers must have waited for all invocations.
        """
        calls = [(entry, self._at_first(entry, arguments, device)) for entry, arguments in self._recorded]
        in_flight: deque[Pending] = deque()
        begin = time.perf_counter()
        for call in calls:
            in_flight.append(self._program.submit(*call))
            if len(in_flight) > DEPTH:
                in_flight.popleft().wait()
        for pending in in_flight:
            pending.wait()
        taken = time.perf_counter() - begin
        self._recorded.clear()
        self._num_runs.clear()
        self._first.clear()
        return taken

    def _at_first(self, entry: str, arguments: list[DeviceBuffer], device: Device) -> list[DeviceBuffer]:
        """Return the arguments with the positions of a decode loop as they were when recording began."""
        if not _is_loop(entry):
            return arguments
        positions = arguments[_POSITIONS]
        if (count := self._num_runs.pop(id(positions), 0)) > 0:
            now = device.download(positions)
            self._first[id(positions)] = device.upload(np.where(now >= 0, now - count, now))
        return [*arguments[:_POSITIONS], self._first[id(positions)], *arguments[_POSITIONS + 1 :]]


def _is_loop(entry: str) -> bool:
    return entry.startswith(EntryFamily.DECODE_LOOP)
