"""The emulated GPU of this process: two devices, whose settings tests change by commands."""

from __future__ import annotations

import os
from functools import cache

from emulated_gpu.control import Control
from emulated_gpu.library import EmulatedGpu

SETTINGS = EmulatedGpu(devices=2)


@cache
def loaded() -> Control:
    """Loads the library with two gfx942. All tests must load it here: the first one decides the devices."""
    os.environ.update(SETTINGS.environment())
    return Control()
