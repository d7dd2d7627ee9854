"""The report of `shortfin-llm inspect`, its JSON document, and the summary that `build` prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shortfin_apps.llm import __version__
from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.program_record import ProgramRecord
from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.runtime.vmfb import check_file
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.device_names import kind_of, split_devices
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, missing_extra
from shortfin_apps.llm.tools.inspection.entries import EntryFacts, read_entries, read_signatures
from shortfin_apps.llm.tools.inspection.kernels import GpuCode, KernelFacts, Remark, read_kernels, remarks
from shortfin_apps.llm.tools.inspection.subject import (
    CacheSizes,
    ParameterGroup,
    Subject,
    cache_sizes,
    open_directory,
    parameter_groups,
)

SCHEMA = "shortfin-llm-inspect/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of the inspected files.

    `entry_bytes`: memory that a server keeps for the results and the shared workspace of all entries. `code`
    is None without readable AMD machine code; `notes` say which parts could not be read.
    """

    subject: Subject
    entries: tuple[EntryFacts, ...]
    parameters: tuple[ParameterGroup, ...]
    cache: CacheSizes
    entry_bytes: int
    code: GpuCode | None
    notes: tuple[str, ...]

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        return self.code.kernels if self.code else ()

    @property
    def program_bytes(self) -> int:
        return self.subject.vmfb.stat().st_size

    @property
    def is_counted(self) -> bool:
        """Whether the launches per kernel are known for every entry."""
        return self.code is not None and all(entry.launches is not None for entry in self.entries)


def make_report(subject: Subject) -> Report:
    """Read all files of `subject`. Raises ArtifactError if files are missing, damaged or inconsistent."""
    check_file(subject.vmfb)
    notes: list[str] = []
    if missing := subject.missing_files:
        notes.append(f"missing, for other programs than this one: {', '.join(missing)}")
    try:
        code = read_kernels(subject.vmfb)
    except ArtifactError as error:
        code = None
        notes.append(f"the kernels are not shown: {error}")
    return Report(
        subject=subject,
        entries=read_entries(subject, code),
        parameters=parameter_groups(subject),
        cache=cache_sizes(subject.config),
        entry_bytes=owned_bytes(read_signatures(subject)),
        code=code,
        notes=tuple(notes),
    )


def select_entries(report: Report, patterns: Sequence[str]) -> Report:
    """Reduce the report to entries that match one of the shell-style `patterns`, and the kernels they launch.

    Without patterns, the report is returned unchanged. Raises InvalidRequestError for a pattern that matches
    no entry.
    """
    if not patterns:
        return report
    for pattern in patterns:
        if not any(fnmatchcase(entry.name, pattern) for entry in report.entries):
            names = ", ".join(entry.name for entry in report.entries)
            raise InvalidRequestError(f"no entry matches {pattern}; there are {names}", "entry")
    entries = tuple(e for e in report.entries if any(fnmatchcase(e.name, each) for each in patterns))
    chosen = replace(report, entries=entries)
    if report.code is None or not chosen.is_counted:
        return chosen
    launched = {name for entry in entries for name in entry.launches or ()}
    kept = tuple(
        tuple(kernel for kernel in kernels if kernel.name in launched) for kernels in report.code.code_objects
    )
    return replace(chosen, code=replace(report.code, code_objects=kept))


def document(report: Report) -> dict[str, Any]:
    """Return the JSON document: sizes are in bytes, unknown values are None."""
    manifest, config = report.subject.manifest, report.subject.config
    return {
        "schema": SCHEMA,
        "version": __version__,
        "model": report.subject.name,
        "vmfb": str(report.subject.vmfb),
        "source": manifest and asdict(manifest.source),
        "built_with": manifest and {"shortfin-llm": manifest.product_version, **manifest.versions},
        "target": manifest and asdict(manifest.program.target),
        "programs": [_program(each, manifest) for each in manifest.programs] if manifest else [],
        "weights": manifest and manifest.options.weights,
        "batch_invariant": manifest and manifest.gives_same_bits,
        "operations": manifest and list(manifest.program.kernels),
        "top_k": config.top_k,
        "program_bytes": report.program_bytes,
        "parameters": [asdict(group) for group in report.parameters],
        "cache": asdict(report.cache),
        "entry_bytes": report.entry_bytes,
        "entries": [asdict(entry) for entry in report.entries],
        "chip": report.code and report.code.chip,
        "kernels": [_kernel(kernel) for kernel in report.kernels],
        "notes": list(report.notes),
    }


def _program(program: ProgramRecord, manifest: Manifest) -> dict[str, Any]:
    """Describe one of the artefact's programs, whether it is the inspected one or not."""
    return {
        "name": program.target.name,
        "vmfb": program.vmfb,
        "parameters": program.parameters,
        "bytes": {name: manifest.files[name].size_bytes for name in program.files if name in manifest.files},
    }


def _kernel(kernel: KernelFacts) -> dict[str, Any]:
    return {
        **asdict(kernel),
        "loads": [{"bytes": width, "count": count} for width, count in kernel.loads],
        "operation": kernel.operation,
        "widest_load": kernel.widest_load,
        "commonest_load": kernel.commonest_load,
        "remarks": [remark.value for remark in remarks(kernel)],
    }


def after(args: argparse.Namespace) -> None:
    """After `build --device hip...`, print a summary of the kernels on stderr. Raises ArtifactError."""
    if any(kind_of(each) == "hip" for each in split_devices(args.device)):
        print(visible("\n".join(summary(args.output))), file=sys.stderr)


def summary(directory: Path) -> list[str]:
    """Return the lines that `build` prints about its artefact's kernels. Raises ArtifactError.

    Of an artefact for several chips, the lines are about the first. If the optional dependency that reads
    machine code is missing, return one line that names it.
    """
    try:
        report = make_report(open_directory(directory))
    except ModuleNotFoundError as error:
        if (needed := missing_extra(error)) is None:
            raise
        return [f"no summary of the kernels: {needed}"]
    lines = [*report.notes]
    if report.code is not None:
        lines += [_kernel_counts(report), _dispatches(report)]
    return [*lines, f"`shortfin-llm inspect {directory}` shows more"]


def _kernel_counts(report: Report) -> str:
    num_matrix = sum(kernel.num_matrix_instructions > 0 for kernel in report.kernels)
    found = [remark for kernel in report.kernels for remark in remarks(kernel)]
    counts = ", ".join(f"{remark} {found.count(remark)}" for remark in Remark if remark in found)
    chip = report.code.chip if report.code else ""
    return (
        f"kernels: {len(report.kernels):,} for {chip}, {num_matrix:,} with matrix instructions; "
        f"remarks: {counts or 'none'}"
    )


def _dispatches(report: Report) -> str:
    counts = [f"{entry.name} {entry.num_dispatches}" for entry in report.entries if entry.num_dispatches]
    return f"dispatches of an invocation: {', '.join(counts) or 'not known'}"
