"""The programs of an artefact: one, or one for each kind of CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shortfin_apps.llm.artifact.file_names import PROGRAM_FILE
from shortfin_apps.llm.contract.host_cpu import HostCpu

FileName = Annotated[str, Field(pattern=f"^{PROGRAM_FILE}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """The target that a program was compiled for. `features` are LLVM's names; empty for a GPU."""

    device: str
    architecture: str
    cpu: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """The CPU or chip as in `--device`: LLVM's name, or `host` for the CPU that built the program."""
        return self.device.partition(":")[2] or "host"

    @property
    def gives_same_bits(self) -> bool:
        """Whether all entries compute bit-identical logits for a token in any batch composition.

        True for x86-64 CPUs without AMX, as measured; False for other targets, where this is unknown.
        """
        has_amx = any(feature.startswith("amx") for feature in self.features)
        return self.architecture == "x86_64" and not has_amx

    @property
    def description(self) -> str:
        """The name, and the CPU's name in parentheses if it differs."""
        return self.name if self.name == self.cpu else f"{self.name} ({self.cpu})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """A program: names of its files in the artefact, its target, and how it was compiled.

    Programs with equal weight layouts share a parameters file. `kernels` has a line per kind of operation:
    the implementation, and why it was chosen.
    """

    vmfb: FileName
    parameters: FileName
    target: TargetRecord
    compile_flags: tuple[str, ...]
    kernels: tuple[str, ...]

    @property
    def files(self) -> tuple[str, str]:
        return self.vmfb, self.parameters


def choose_program(programs: Sequence[ProgramRecord], host: HostCpu) -> ProgramRecord | None:
    """Return the best program that `host` can execute, or None. `programs` must be sorted, the best first.

    If `host` does not report its features, returns the last program, which needs the fewest features.
    """
    if not host.features:
        return programs[-1]
    return next((each for each in programs if not host.missing(each.target.features)), None)


def reasons_against(
    programs: Sequence[ProgramRecord], chosen: ProgramRecord | None, host: HostCpu
) -> list[str]:
    """Return, for each program except `chosen`, a phrase that says why it is not the best one for `host`."""
    return [_reason(each, host) for each in programs if each is not chosen]


def _reason(program: ProgramRecord, host: HostCpu) -> str:
    if not host.features:
        return f"{program.target.description} may need more, and this host does not tell its features"
    if missing := host.missing(program.target.features):
        return f"{program.target.description} needs {', '.join(missing)}"
    return f"{program.target.description} uses less of it"
