"""The side of EmulatedCpu (emulated_cpu.py) that runs in the emulator: a device, called over a connection.

Buffers and programs stay here and are known by numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature
from shortfin_apps.llm.components.runtime.iree_local import open_local_task

Array = npt.NDArray[Any]
Described = tuple[int, tuple[int, ...], np.dtype[Any]]  # number, shape, dtype


class Guest:
    """The methods are what EmulatedCpu calls."""

    def __init__(self) -> None:
        self._device = open_local_task()
        self._kept: list[Any] = []

    def load_program(
        self, vmfb: Path, parameters: Sequence[Path], module_name: str
    ) -> tuple[int, Mapping[str, EntrySignature]]:
        program = self._device.load_program(vmfb, parameters, module_name)
        return self._keep(program), dict(program.entries)

    def upload(self, array: Array) -> Described:
        return self._described(self._device.upload(array))

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Described:
        return self._described(self._device.allocate(shape, dtype))

    def download(self, number: int) -> Array:
        return self._device.download(self._kept[number])

    def invoke(self, program: int, entry: str, arguments: Sequence[int]) -> list[Described]:
        results = self._kept[program].submit(entry, [self._kept[each] for each in arguments]).wait()
        return [self._described(each) for each in results]

    def load_functions(self, vmfb: bytes) -> int:
        """A module of functions that return when they are done."""
        config = iree.Config("local-sync")
        module = iree.VmModule.copy_buffer(config.vm_instance, vmfb)
        return self._keep(iree.load_vm_module(module, config))

    def call(self, module: int, function: str, arguments: Sequence[Array]) -> list[Array]:
        results = self._kept[module][function](*arguments)
        results = results if isinstance(results, list | tuple) else [results]
        return [each.to_host() for each in results]

    def _keep(self, thing: object) -> int:
        self._kept.append(thing)
        return len(self._kept) - 1

    def _described(self, buffer: DeviceBuffer) -> Described:
        return self._keep(buffer), buffer.shape, buffer.dtype


def serve(connection: Connection) -> None:
    """Answers calls until the other side closes; whatever is raised ends the process."""
    guest = Guest()
    with suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            method: Callable[..., object] = getattr(guest, name)
            connection.send(method(*arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
