from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.gpu.recorded_traffic import RecordedTraffic
from tests.components.fake_device import FakeBuffer


class Program:
    """A decode loop that notes its positions, and advances them."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.ran: list[tuple[str, list[int]]] = []

    def submit(self, entry: str, arguments: Sequence[Any]) -> Any:
        positions = arguments[2].array
        self.ran.append((entry, positions.tolist()))
        if entry.startswith("decode_loop"):
            positions[positions >= 0] += 1
        return self

    def wait(self) -> Sequence[Any]:
        return ()


class Device:
    def download(self, buffer: FakeBuffer) -> np.ndarray:
        return buffer.array.copy()

    def upload(self, array: np.ndarray) -> FakeBuffer:
        return FakeBuffer(array.copy())


def test_positions_are_as_when_recording_began() -> None:
    program = Program()
    traffic = RecordedTraffic(program)
    other, positions = FakeBuffer(np.array([3])), FakeBuffer(np.array([5, 9, -1]))
    invoke = [("decode_loop_bs4", positions), ("prefill_bs1", other), ("decode_loop_bs4", positions)]
    for _ in range(2):
        traffic.submit("decode_loop_bs4", [other, other, positions])
    traffic.start()
    for entry, buffer in invoke:
        traffic.submit(entry, [other, other, buffer])
    traffic.stop()
    traffic.submit("decode_loop_bs4", [other, other, positions])
    recorded = program.ran[2:-1]
    program.ran.clear()
    traffic.replay_s(Device())  # type: ignore[arg-type]
    assert (
        program.ran
        == recorded
        == [
            ("decode_loop_bs4", [7, 11, -1]),
            ("prefill_bs1", [3]),
            ("decode_loop_bs4", [8, 12, -1]),
        ]
    )
    assert positions.array.tolist() == [10, 14, -1]
