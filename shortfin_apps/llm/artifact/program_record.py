"""The programs of an artefact: one, or one for each kind of CPU that it was built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shortfin_apps.llm.artifact.file_names import PROGRAM_FILE
from shortfin_apps.llm.host_cpu import HostCpu

FileName = Annotated[str, Field(pattern=f"^{PROGRAM_FILE}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """The target that a program was compiled for; `features` are LLVM's names, empty for a GPU."""

    device: str
    architecture: str
    cpu: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """The CPU or chip as `--device` names it: LLVM's name, or `host` for the one that built."""
        return self.device.partition(":")[2] or "host"

    @property
    def gives_same_bits(self) -> bool:
        """Whether all entries give a token the same logits to the bit, whatever else is in the batch.

        Measured on x86-64 CPUs without AMX, and not known of others.
        """
        has_amx = any(feature.startswith("amx") for feature in self.features)
        return self.architecture == "x86_64" and not has_amx

    @property
    def description(self) -> str:
        """The name, and the CPU that it stands for."""
        return self.name if self.name == self.cpu else f"{self.name} ({self.cpu})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """A program, with its files' names in the artefact; those with equal weight layouts share parameters.

    `kernels` say for each kind of operation what computes it, and why.
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
    """The first that the CPU can execute; None if there is none. Builds list the best first.

    On a host that does not tell its features it is the last, which needs least.
    """
    if not host.features:
        return programs[-1]
    return next((each for each in programs if not host.missing(each.target.features)), None)


def reasons_against(
    programs: Sequence[ProgramRecord], chosen: ProgramRecord | None, host: HostCpu
) -> list[str]:
    """For each program but the chosen one, why it is not the one that this CPU takes."""
    return [_reason(each, host) for each in programs if each is not chosen]


def _reason(program: ProgramRecord, host: HostCpu) -> str:
    if not host.features:
        return f"{program.target.description} may need more, and this host does not tell its features"
    if missing := host.missing(program.target.features):
        return f"{program.target.description} needs {', '.join(missing)}"
    return f"{program.target.description} uses less of it"
