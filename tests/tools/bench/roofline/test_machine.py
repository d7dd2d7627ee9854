from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.tools.bench.roofline.machine import RUNS, SIZE, STREAM_ROW_BYTES, Machine, load_machine
from tests.components.fake_device import FakeDevice, FakePending, FakeProgram, fake_config


class Ticking(FakeProgram):
    """Counts its runs and does nothing."""

    def __init__(self) -> None:
        super().__init__(fake_config())
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.shapes.append((entry, arguments[0].shape))
        return FakePending(list)


def clock() -> Iterator[float]:
    """A clock by which runs take 3 s, except the second, which takes 2 s."""
    now = 0.0
    for run in range(100):
        yield now
        now += 2.0 if run == 1 else 3.0
        yield now


def test_speeds_are_of_the_best_run() -> None:
    program, ticks = Ticking(), clock()
    machine = Machine(FakeDevice(program), program, clock=lambda: next(ticks))
    assert machine.bytes_per_s(10 * STREAM_ROW_BYTES) == 10 * STREAM_ROW_BYTES / 2
    assert machine.flops_per_s() == 3 * 2 * SIZE**3 / 3
    assert [entry for entry, _ in program.shapes] == ["stream"] * (1 + RUNS) + ["matmul"] * (1 + RUNS)
    assert program.shapes[0][1][0] == 10


def test_the_probes_compute_the_right_result(tiny_artifact: Artifact) -> None:
    """Runs the real probes: the stream adds up every column, and both speeds are positive."""
    manifest = tiny_artifact.manifest
    assert manifest is not None
    device = open_device()
    machine = load_machine(device, manifest.spec, manifest.options)
    rng = np.random.default_rng(0)
    x = rng.integers(-1000, 1000, (3, STREAM_ROW_BYTES // 4), np.int32)
    (sums,) = machine.program.submit("stream", [device.upload(x)]).wait()
    np.testing.assert_array_equal(device.download(sums), x.sum(axis=1))
    assert machine.bytes_per_s(1) > 0
    assert machine.flops_per_s() > 0
