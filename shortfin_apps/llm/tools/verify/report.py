"""The results of `verify`, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from shortfin_apps.llm.components.self_test import report
from shortfin_apps.llm.tools.verify.run import ProgramResult, Verified


def tables(found: Verified) -> Iterator[Table | str]:
    """Yields the wrong files, and a table of each program's entries."""
    count = len(found.manifest.files)
    if not found.wrong_files:
        yield f"{found.directory}: all {count} files are unchanged since the build"
    for name, problem in found.wrong_files.items():
        yield f"{found.directory / name}: {problem}"
    for result in found.results:
        yield from _program(found, result)
    if found.untested is not None:
        yield f"not tested: {found.untested}"


def _program(found: Verified, result: ProgramResult) -> Iterator[Table | str]:
    title = f"program for {result.program} on {result.device}"
    if result.outcome is None:
        yield f"{title}: {result.problem}"
        return
    allowed = f"{result.outcome.file.tolerance:.2g}"
    table = Table("entry", "rows", f"error (allowed {allowed})", "bits", "result", title=title)
    failures = {each.entry: each.problem for each in result.failures}
    for entry in result.outcome.entries:
        rows = [row for row in result.outcome.rows if row.entry == entry]
        errors = [row.error for row in rows if not row.is_drawn]
        table.add_row(
            entry,
            str(len(rows)),
            f"{max(errors):.2g}" if errors else "",
            _bits(result, entry) if errors else "",
            failures.get(entry) or ("ok" if rows else "too few pages"),
        )
    yield table
    if result.failures:
        subject = report.Subject(device=result.device, kernels=_kernels(found, result))
        yield report.sentence(subject, result.failures, result.location)


def _bits(result: ProgramResult, entry: str) -> str:
    """Returns whether the entry's logits are bit-identical to most entries' logits."""
    return "differ" if entry in result.differing_bits else "same"


def document(found: Verified) -> dict[str, Any]:
    return {
        "directory": str(found.directory),
        "is_right": found.is_right,
        "wrong_files": found.wrong_files,
        "untested": found.untested,
        "programs": [_program_document(found, each) for each in found.results],
    }


def _program_document(found: Verified, result: ProgramResult) -> dict[str, Any]:
    head: dict[str, Any] = {
        "program": result.program,
        "is_right": result.is_right,
        "problem": result.problem,
        "differing_bits": list(result.differing_bits),
    }
    if result.outcome is None:
        return {**head, "device": result.device}
    kernels = _kernels(found, result)
    subject = report.Subject(device=result.device, identity=found.manifest.identity, kernels=kernels)
    return {**head, **report.document(subject, result.outcome, result.failures, result.location)}


def _kernels(found: Verified, result: ProgramResult) -> tuple[str, ...]:
    return next(each.kernels for each in found.manifest.every_program if each.target.name == result.program)
