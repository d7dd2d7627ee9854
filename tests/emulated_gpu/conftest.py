"""The emulated GPU in this process: two devices, whose settings tests change by commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_gpu.control import Control
from tests.hip import SETTINGS, EmulatedGpus


@pytest.fixture(scope="session")
def control(emulated_gpus: EmulatedGpus) -> Control:
    """The library, loaded with two gfx942."""
    return emulated_gpus.control


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
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.emulated)
