"""The emulated AMD GPU of a checkout of this project, as `counts` needs it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shortfin_apps.llm.bench.roofline.counts import KernelCounts
from shortfin_apps.llm.errors import InvalidRequestError

if TYPE_CHECKING:
    from emulated_gpu.control import Control

_MEMORY_BYTES = 128 << 30  # of the device; only what is used takes memory of the host


class EmulatedGpu:
    def __init__(self, control: Control) -> None:
        self._control = control

    def clear(self) -> None:
        self._control.clear_report()

    def counts(self) -> Iterable[KernelCounts]:
        return self._control.report().kernels.values()

    def findings(self) -> Sequence[str]:
        return [
            f"{found.kind} by {found.kernel}, {found.instruction} at {found.code_address:#x}"
            for found in self._control.report().findings
        ]


def open_emulated_gpu(chip: str) -> EmulatedGpu:
    """Makes this process, which must not have used HIP, use an emulated GPU. Raises InvalidRequestError."""
    try:
        from emulated_gpu.control import Control
        from emulated_gpu.errors import EmulatedGpuError
        from emulated_gpu.library import EmulatedGpu as Settings
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "the emulated GPU is not part of the installed package; run this in a checkout of the project, "
            "as `python -m shortfin_apps.llm bench roofline DIR --emulated`",
            "emulated",
        ) from error
    try:
        os.environ.update(Settings(chip, memory_bytes=_MEMORY_BYTES).environment())
        control = Control()
        control.command("unique-bytes 1")
        return EmulatedGpu(control)
    except EmulatedGpuError as error:
        raise InvalidRequestError(str(error), "emulated") from error
