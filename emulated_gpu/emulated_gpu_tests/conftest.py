"""Fixtures of the emulated GPU, and the mark of tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.devices import SETTINGS, loaded


@pytest.fixture(scope="session")
def control() -> Control:
    return loaded()


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
