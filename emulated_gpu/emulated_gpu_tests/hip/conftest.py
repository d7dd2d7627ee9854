"""Fixtures of the tests of the HIP interface."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.hip.api import Hip


@pytest.fixture
def hip(fresh: Control) -> Iterator[Hip]:
    """The interface, with device 0 current."""
    hip = Hip(fresh.library)
    hip.set_device(0)
    yield hip
    hip.set_device(0)
