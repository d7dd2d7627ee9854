"""A device that has loaded one program, for engines and runners that load it again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.device import Array, Device, DeviceBuffer, Program


class OneProgram:
    """A device whose `load_program` returns the artefact's program, so that its weights are loaded once."""

    def __init__(self, device: Device, artifact: Artifact) -> None:
        self._device = device
        self._vmfb = artifact.vmfb
        self.program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)

    @property
    def name(self) -> str:
        return self._device.name

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        assert vmfb == self._vmfb, "there is one program"
        return self.program

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> DeviceBuffer:
        return self._device.allocate(
            shape, dtype, stage=stage, only_dispatches=only_dispatches, on_host=on_host
        )

    def spare_bytes(self, stage: int = 0) -> int | None:
        return self._device.spare_bytes(stage)

    def upload(self, array: Array) -> DeviceBuffer:
        return self._device.upload(array)

    def download(self, buffer: DeviceBuffer) -> Array:
        return self._device.download(buffer)

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        self._device.clear(buffer, rows)

    def close(self) -> None:
        self._device.close()
