"""The emulated GPU in this process: two devices, whose settings tests change by commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_gpu.control import Control
from emulated_gpu.library import EmulatedGpu

# A process has the devices of whoever loads the library first, so other tests of the process use the same.
SETTINGS = EmulatedGpu(devices=2)


@pytest.fixture(scope="session")
def control() -> Control:
    """The library, loaded with two gfx942."""
    os.environ.update(SETTINGS.environment())
    return Control()


@pytest.fixture
def fresh(control: Control) -> Iterator[Control]:
    """The same, with whatever a test asks for undone after it."""
    control.clear_report()
    yield control
    for command in ("forget", "order random", "idle 2", "seed 0", "chip gfx942"):
        control.command(command)
    for device in range(SETTINGS.devices):
        for verb in ("resume", "revive"):
            control.command(f"{verb} {device}")
        control.command(f"memory {device} {SETTINGS.memory_bytes}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests but the ones of `machine_code`, which need no library."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and folder / "machine_code" not in item.path.parents:
            item.add_marker(pytest.mark.emulated)
