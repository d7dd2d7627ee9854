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
    """The target that a program was compiled for; `features` are LLVM's names, empty for a GPU."""

    device: str
    architecture: str
    cpu: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """The CPU or chip as in `--device`: LLVM's name, or `host` for the CPU of the build."""
        return self.device.partition(":")[2] or "host"

    @property
    def gives_same_bits(self) -> bool:
        """True if all entries give a token bit-identical logits for any batch composition.

        Measured on x86-64 CPUs without AMX; unknown for others.
        """
        has_amx = any(feature.startswith("amx") for feature in self.features)
        return self.architecture == "x86_64" and not has_amx

    @property
    def description(self) -> str:
        """The name, and the CPU that it stands for."""
        return self.name if self.name == self.cpu else f"{self.name} ({self.cpu})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """A program, with its files' names in the artefact. Programs with equal weight layouts share parameters.

    `kernels` lists for each kind of operation its implementation and the reason.
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
    """Returns the first program that the CPU can execute, or None. Builds list the best first.

    If the host does not report its features, returns the last, which needs the fewest.
    """
    if not host.features:
        return programs[-1]
    return next((each for each in programs if not host.missing(each.target.features)), None)


def reasons_against(
    programs: Sequence[ProgramRecord], chosen: ProgramRecord | None, host: HostCpu
) -> list[str]:
    """Explains for each program except the chosen one why it does not suit this CPU best."""
    return [_reason(each, host) for each in programs if each is not chosen]


def _reason(program: ProgramRecord, host: HostCpu) -> str:
    if not host.features:
        return f"{program.target.description} may need more, and this host does not tell its features"
    if missing := host.missing(program.target.features):
        return f"{program.target.description} needs {', '.join(missing)}"
    return f"{program.target.description} uses less of it"
