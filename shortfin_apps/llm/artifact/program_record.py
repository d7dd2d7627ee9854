"""The programs of an artefact: one, or one for each of several CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shortfin_apps.llm.artifact.file_names import PROGRAM_FILE
from shortfin_apps.llm.contract.device_names import kind_of, name_of
from shortfin_apps.llm.contract.host_cpu import HostCpu
from shortfin_apps.llm.contract.host_gpu import HostGpu, sm_number

Host = HostCpu | HostGpu  # a device to run on

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
        return name_of(self.device)

    @property
    def kind(self) -> str:
        """The kind of device: cpu, hip or cuda."""
        return kind_of(self.device)

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
    """A program: names of its files in the artefact, its target, entries, and how it was compiled.

    Programs with equal weight layouts share a parameters file, and programs of one kind of device a config.
    `kernels` has a line per kind of operation: the implementation, and why it was chosen.
    """

    vmfb: FileName
    parameters: FileName
    config: FileName
    entries: tuple[str, ...]
    target: TargetRecord
    compile_flags: tuple[str, ...]
    kernels: tuple[str, ...]

    @property
    def files(self) -> tuple[str, str]:
        return self.vmfb, self.parameters


def choose_program(programs: Sequence[ProgramRecord], host: Host) -> ProgramRecord | None:
    """Return the best program that `host` can execute, or None. Programs of CPUs are sorted, best first.

    A CPU that does not report its features gets the last one, which needs the fewest; an NVIDIA GPU the one
    for the newest chip.
    """
    usable = [each for each in programs if _obstacle(each.target, host) is None]
    if not usable:
        return None
    if isinstance(host, HostGpu):
        return max(usable, key=lambda each: sm_number(each.target.cpu)) if host.kind == "cuda" else usable[0]
    return usable[0 if host.features else -1]


def reasons_against(programs: Sequence[ProgramRecord], chosen: ProgramRecord | None, host: Host) -> list[str]:
    """Return, for each program of the host's kind but `chosen`, a phrase why it is not the best one."""
    others = [each.target for each in programs if each is not chosen]
    return [f"{each.description} {_reason(each, host)}" for each in others if each.kind == host.kind]


def _reason(target: TargetRecord, host: Host) -> str:
    if reason := _obstacle(target, host):
        return reason
    if isinstance(host, HostCpu) and not host.features:
        return "may need more, and this host does not tell its features"
    return "uses less of it"


def _obstacle(target: TargetRecord, host: Host) -> str | None:
    """Return a phrase why `host` cannot execute programs for `target`; None if it can."""
    if target.kind != host.kind:
        return "is for another kind of device"
    if isinstance(host, HostGpu):
        return None if host.runs(target.cpu) else "is another chip"
    if host.is_of_another_architecture(target.architecture):
        return f"is a CPU of another architecture ({target.architecture})"
    missing = host.missing(target.features)
    return f"needs {', '.join(missing)}" if missing else None
