"""AMD GPUs for tests: the emulated ones, whose findings fail the test that caused them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from emulated_gpu.control import Control, Finding
from emulated_gpu.library import EmulatedGpu
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import open_device

CHIPS = ("gfx942", "gfx1100")
SETTINGS = EmulatedGpu(devices=2)  # of the chip that the devices have between tests

_num_tests: Counter[str] = Counter()


class EmulatedGpus:
    """The emulated GPUs of this process, which are of one chip at a time."""

    @cached_property
    def control(self) -> Control:
        """The library, which is compiled and loaded here; IREE finds it from then on."""
        os.environ.update(SETTINGS.environment())
        return Control()

    def open(self, chip: str, *device_ids: str) -> Device:
        """Opens devices of a chip, one per pipeline stage."""
        self.set_chip(chip)
        return open_device("hip", device_ids=device_ids)

    def set_chip(self, chip: str) -> None:
        """Makes the devices of `chip`, for programs that are loaded from now on."""
        self.control.command(f"chip {chip}")

    def restore_chip(self) -> None:
        """Makes the devices of the chip they had at first, if a test loaded the library."""
        if "control" in vars(self):
            self.set_chip(SETTINGS.chip)

    @contextmanager
    def watch(self, chip: str) -> Iterator[Control]:
        """A test on a chip. Raises AssertionError if its kernels, or its calls, did something wrong.

        An exception of the test's own gets that as a note, as it may be the reason.
        """
        self.set_chip(chip)
        self.control.clear_report()
        _num_tests[chip] += 1
        try:
            yield self.control
        except Exception as error:
            error.add_note("\n".join(self._found()))
            raise
        found = self._found()
        assert not found, "\n".join(found)

    def _found(self) -> list[str]:
        report = self.control.report()
        return [*map(describe, report.findings), *(f"{m.what}: {m.text}" for m in report.misuses)]


def describe(finding: Finding) -> str:
    """One line on a finding, as a failing test prints it."""
    where = f"workgroup {finding.workgroup}, wave {finding.wave}, lane {finding.lane}"
    if finding.other_instruction:
        where += f", after {finding.other_instruction} at {finding.other_code_address:#x}"
        where += f" by workgroup {finding.other_workgroup}"
    return (
        f"{finding.kind}: {finding.kernel}: {finding.instruction} at {finding.code_address:#x}, {where}, "
        f"address {finding.address:#x}, {finding.repetitions + 1} times"
    )


def summary() -> str | None:
    """One line on the tests that ran machine code so far, by chip; None if there were none."""
    counts = ", ".join(f"{chip} {count} tests" for chip, count in sorted(_num_tests.items()))
    return f"AMD GPUs emulated: {counts}" if counts else None
