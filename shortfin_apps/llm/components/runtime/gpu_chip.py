"""The chip of a GPU, as its driver reports it; an artefact's programs are each for one chip."""

from __future__ import annotations

import ctypes
import re

from shortfin_apps.llm.components.runtime.device import GpuDriver
from shortfin_apps.llm.components.runtime.memory import HIP, loaded_library
from shortfin_apps.llm.contract.host_gpu import nvidia_chip

_PROPERTIES_BYTES = 1 << 14  # more than `hipDeviceProp_t` of any release
_CHIP = re.compile(rb"gfx[0-9a-f]+")


def gpu_chip(driver: GpuDriver, ordinal: int) -> str | None:
    """Return the chip of a GPU, by LLVM's name; None if the driver does not report it.

    IREE must have listed the driver's GPUs before, which loads the driver.
    """
    return nvidia_chip(ordinal) if driver == "cuda" else _hip_chip(ordinal)


def _hip_chip(ordinal: int) -> str | None:
    library = loaded_library(HIP)
    properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
    if library is None or library.hipGetDeviceProperties(properties, ordinal) != 0:
        return None
    # `gcnArchName`, as in "gfx90a:sramecc+:xnack-", is at another place in each release of the structure.
    found = _CHIP.search(properties.raw)
    return found[0].decode() if found else None
