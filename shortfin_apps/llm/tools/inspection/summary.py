"""A short summary of the kernels of a build for a GPU."""

from __future__ import annotations

from pathlib import Path

from shortfin_apps.llm.contract.errors import missing_extra
from shortfin_apps.llm.tools.inspection.remarks import Remark, remarks
from shortfin_apps.llm.tools.inspection.report import Report, make_report
from shortfin_apps.llm.tools.inspection.subject import open_directory


def summary(directory: Path) -> list[str]:
    """Returns the lines that `build` prints about its artefact's kernels. Raises ArtifactError.

    Without the extra that reads machine code, which a build does not need, returns a line that names it.
    """
    try:
        report = make_report(open_directory(directory))
    except ModuleNotFoundError as error:
        if (needed := missing_extra(error)) is None:
            raise
        return [f"no summary of the kernels: {needed}"]
    lines = [*report.notes]
    if report.code is not None:
        lines += [_kernels(report), _dispatches(report)]
    return [*lines, f"`shortfin-llm inspect {directory}` shows more"]


def _kernels(report: Report) -> str:
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
