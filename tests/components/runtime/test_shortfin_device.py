"""The order of events on the worker thread of ShortfinDevice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("shortfin", reason="shortfin is not installed")

from shortfin_apps.llm.components.runtime.shortfin_device import (
    ShortfinDevice,
    ShortfinProgram,
    open_hostcpu,
)

pytestmark = pytest.mark.timeout(60)

TURNS_LATE = 1_000  # of the worker's event loop


def test_close_frees_nothing_before_every_future_is_resolved(
    artefacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline may complete many turns of the event loop before the futures are resolved."""
    complete = ShortfinDevice._complete
    answered_at_release: list[bool] = []

    async def complete_late(device: ShortfinDevice, completion: Any, *arguments: Any) -> None:
        for _ in range(TURNS_LATE):
            await asyncio.sleep(0)
        await complete(device, completion, *arguments)

    def release(program: ShortfinProgram) -> None:
        answered_at_release.extend(step._future.done() for step in pending)

    monkeypatch.setattr(ShortfinDevice, "_complete", complete_late)
    monkeypatch.setattr(ShortfinProgram, "release", release)
    device = open_hostcpu()
    program = device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")
    pending = [program.submit("double_i64", [device.upload(np.full((1, 2), i))]) for i in range(3)]
    device.close()
    assert answered_at_release == [True] * 3


def test_any_number_of_arrays_may_be_freed_at_once(artefacts: Path) -> None:
    device = open_hostcpu()
    program = device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")
    for _ in range(3):
        buffers = [device.upload(np.full((1, 2), number)) for number in range(300)]
        for buffer in buffers:
            program.submit("double_i64", [buffer]).wait()
        del buffer, buffers
        result = program.submit("double_i64", [device.upload(np.full((1, 2), 4))]).wait()
        assert device.download(result[0]).tolist() == [[8, 8]]
    device.close()
