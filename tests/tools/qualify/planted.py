"""Devices with a fault each, and a bench whose subject runs on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.runtime.device import (
    Array,
    Device,
    DeviceBuffer,
    EntrySignature,
    Pending,
    Program,
)
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.checks import BY_NAME, run_check
from shortfin_apps.llm.tools.qualify.outcome import Outcome

Fault = Callable[[Device], Any]


def check_on(fault: Fault, subject: str, *names: str, device: str = "cpu") -> list[Outcome]:
    """The outcomes of checks in this process, of which a device with the fault runs the subject."""
    bench = Bench(Plan(subject, device), lambda kind: fault(open_device(kind)))
    try:
        return [run_check(BY_NAME[name], bench, 60.0) for name in names]
    finally:
        bench.close()


class Faulty:
    """A device that is like another one, but for its fault."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class Unsteady(Faulty):
    """Now and then logits have a wrong element, as of a kernel that does not wait for its data."""

    num_downloads = 0

    def download(self, buffer: DeviceBuffer) -> Array:
        array = self._device.download(buffer)
        if array.ndim == 3 and array.dtype.kind == "f":
            self.num_downloads += 1
            if self.num_downloads % 7 == 0:
                array = array.copy()
                array[0, 0, 7] += 0.001
        return array


class Forgetful(Faulty):
    """The fifth upload is not seen: the device reads zeros."""

    num_uploads = 0

    def upload(self, array: Array) -> DeviceBuffer:
        self.num_uploads += 1
        return self._device.upload(array * 0 if self.num_uploads == 5 else array)


@dataclass
class Stale(Faulty):
    """The memory of the first load has other parameters, from its submission `after` on."""

    device: Device
    parameters: Path
    after: int

    def __post_init__(self) -> None:
        super().__init__(self.device)
        self.num_loads = 0

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        right = self._device.load_program(vmfb, parameters, module_name)
        self.num_loads += 1
        if self.num_loads > 1:
            return right
        wrong = self._device.load_program(vmfb, [self.parameters], module_name)
        return Changing(right, wrong, self.after)


class Changing:
    """A program that becomes another one."""

    def __init__(self, before: Program, then: Program, after: int) -> None:
        self._before, self._then, self._left = before, then, after

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._before.entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        self._left -= 1
        return (self._before if self._left >= 0 else self._then).submit(entry, arguments)


class Unordered(Faulty):
    """Of two invocations in flight, the later one runs first: nothing makes it wait for the other."""

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        return Overtaken(self._device.load_program(vmfb, parameters, module_name))


class Overtaken:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._held: Later | None = None

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._program.entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        later = Later(lambda: self._program.submit(entry, arguments))
        held, self._held = self._held, later
        if held is not None and not held.has_begun:
            later.begin()
            held.begin()
        return later


class Later:
    """An invocation that begins when it is waited for, or when the next one has begun."""

    def __init__(self, start: Callable[[], Pending]) -> None:
        self._start = start
        self._pending: Pending | None = None

    @property
    def has_begun(self) -> bool:
        return self._pending is not None

    def begin(self) -> Pending:
        self._pending = self._pending or self._start()
        return self._pending

    def results(self) -> Sequence[DeviceBuffer]:
        return self.begin().results()

    def wait(self) -> Sequence[DeviceBuffer]:
        return self.begin().wait()
