"""Opens the emulated AMD GPU from a checkout of this project."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from emulated_gpu.control import Control

_MEMORY_BYTES = 128 << 30  # of the device; the host allocates only what is used


def open_emulated_gpu(chip: str) -> Control:
    """Make this process use an emulated GPU; it must not have used HIP. Raises InvalidRequestError."""
    try:
        from emulated_gpu.control import Control
        from emulated_gpu.errors import EmulatedGpuError
        from emulated_gpu.library import EmulatedGpu
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "the emulated GPU is not part of the installed package; run this in a checkout of the project, "
            "with `python -m shortfin_apps.llm` in place of `shortfin-llm`",
            "emulated",
        ) from error
    try:
        os.environ.update(EmulatedGpu(chip, memory_bytes=_MEMORY_BYTES).environment())
        control = Control()
        control.command("unique-bytes 1")
        return control
    except EmulatedGpuError as error:
        raise InvalidRequestError(str(error), "emulated") from error
