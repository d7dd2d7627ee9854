"""An aarch64 CPU, emulated by qemu-user, as a Device; and modules of functions that it calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature

ROOT = Path(__file__).parents[2]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class EmulatedBuffer:
    """An array in the emulated process."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Results:
    """What is known at once, of an invocation or a function."""

    buffers: Sequence[DeviceBuffer]

    def results(self) -> Sequence[DeviceBuffer]:
        return self.buffers

    def wait(self) -> Sequence[DeviceBuffer]:
        return self.buffers


@dataclass(frozen=True, slots=True)
class HostArray:
    """A result of a function, with the method of IREE's arrays."""

    array: Array

    def to_host(self) -> Array:
        return self.array


class EmulatedCpu:
    """Implements Device. `folder` is what install.py made; `cpu` is qemu's name of one."""

    name = "aarch64"

    def __init__(self, folder: Path, cpu: str) -> None:
        self._connection, theirs = Pipe()
        python = [str(folder / "python"), "-B", "-m", "tests.aarch64.guest", str(theirs.fileno())]
        self._process = subprocess.Popen(
            ["qemu-aarch64", "-cpu", cpu, "-L", str(folder), *python],
            env={**os.environ, "PYTHONPATH": f"{folder / 'site'}:{ROOT}"},
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, method: str, *arguments: object) -> Any:
        """What that method of Guest returns. Raises EOFError or OSError where it failed, and printed why."""
        self._connection.send((method, arguments))
        return self._connection.recv()

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> EmulatedProgram:
        number, entries = self.ask("load_program", vmfb, list(parameters), module_name)
        return EmulatedProgram(self, number, entries)

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> EmulatedBuffer:
        return EmulatedBuffer(*self.ask("allocate", shape, dtype))

    def spare_bytes(self, stage: int = 0) -> int | None:
        return None

    def upload(self, array: Array) -> EmulatedBuffer:
        return EmulatedBuffer(*self.ask("upload", array))

    def download(self, buffer: DeviceBuffer) -> Array:
        return cast(Array, self.ask("download", cast(EmulatedBuffer, buffer).number))

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class EmulatedProgram:
    """Implements Program; an invocation has ended when `submit` returns."""

    cpu: EmulatedCpu
    number: int
    entries: Mapping[str, EntrySignature]

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Results:
        numbers = [cast(EmulatedBuffer, each).number for each in arguments]
        made = self.cpu.ask("invoke", self.number, entry, numbers)
        return Results([EmulatedBuffer(*each) for each in made])


class EmulatedFunctions:
    """Functions of a module by their names, which take and return arrays as IREE's do."""

    def __init__(self, cpu: EmulatedCpu, vmfb: Path) -> None:
        self._cpu = cpu
        self._number = cpu.ask("load_functions", vmfb.read_bytes())

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Array) -> Any:
            made = [HostArray(each) for each in self._cpu.ask("call", self._number, function, arguments)]
            return made if len(made) > 1 else made[0]

        return call
