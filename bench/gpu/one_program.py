"""A device that has loaded one program, for engines and runners that load it repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.recorded_traffic import RecordedTraffic
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.device import (
    Array,
    Device,
    DeviceBuffer,
    EntrySignature,
    Pending,
    Program,
)


class WithoutEntries:
    """A program without entries that have the prefix `prefix`."""

    def __init__(self, program: Program, prefix: str) -> None:
        self._program = program
        self._prefix = prefix

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        entries = self._program.entries.items()
        return {name: signature for name, signature in entries if not name.startswith(self._prefix)}

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        return self._program.submit(entry, arguments)


class OneProgram:
    """A device with a `load_program` that returns the same program, so that weights are loaded once.

    `kind` is the device as for `shortfin-llm serve --device`.
    """

    def __init__(self, device: Device, artifact: Artifact, kind: str = "cpu") -> None:
        self._device = device
        self.kind = kind
        self._vmfb = artifact.vmfb
        self.program: Program = device.load_program(
            artifact.vmfb, artifact.parameters, artifact.config.module_name
        )

    def without(self, prefix: str) -> OneProgram:
        """Return the same device with a program that lacks entries with this prefix."""
        other = copy(self)
        other.program = WithoutEntries(self.program, prefix)
        return other

    def recorded(self) -> tuple[OneProgram, RecordedTraffic]:
        """Return the same device with a program that can record its invocations, and this program."""
        other = copy(self)
        other.program = recorded = RecordedTraffic(self.program)
        return other, recorded

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
