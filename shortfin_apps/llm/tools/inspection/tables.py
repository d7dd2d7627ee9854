"""Formats a report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.table import Table

from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.tools.inspection.entries import EntryFacts
from shortfin_apps.llm.tools.inspection.kernels import KernelFacts, Remark, remarks
from shortfin_apps.llm.tools.inspection.report import Report

UNKNOWN = "?"
MEMORY_LEGEND = """\
results, workspace: bytes of a call's results and temporaries; by call: they depend on the batch or its
contexts, and each call allocates them. Entries share one workspace, as large as the largest."""
MIN_WIDTH = 150  # columns, so that the table of kernels is legible


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels shown as one table row. They compute the same and differ only in SGPRs and code length."""

    kernels: tuple[KernelFacts, ...]
    launches: int | None  # maximum in one invocation of any entry

    @property
    def num_instructions(self) -> int:
        """The number of instructions of the longest kernel in the row."""
        return max(kernel.num_instructions for kernel in self.kernels)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        return remarks(self.kernels[0])


def tables(report: Report, *, show_all: bool) -> Iterator[RenderableType]:
    """Yield the output from top to bottom. Without `show_all`, only kernels with remarks are shown."""
    yield _overview(report)
    yield _entries(report)
    yield MEMORY_LEGEND
    if report.kernels:
        yield from _kernels(report, show_all)
    yield from report.notes


def _overview(report: Report) -> Table:
    made = Table(title=report.subject.name, title_justify="left", show_header=False, box=None)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in _facts(report):
        made.add_row(name, value)
    return made


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    manifest, cache = report.subject.manifest, report.cache
    if manifest is not None:
        target = manifest.program.target
        yield "source", manifest.source.uri
        yield "target", f"{target.device} ({target.architecture}, {target.cpu})"
        if target.features:
            yield "CPU features", " ".join(target.features)
        yield from _programs(manifest)
        yield "weights", manifest.options.stored_weights
        yield "batch invariant", "yes" if manifest.gives_same_bits else "no"
    elif report.code is not None:
        yield "target", report.code.chip
    yield "program", _megabytes(report.program_bytes)
    for group in report.parameters:
        yield f"parameters {group.type or ''}".strip(), f"{group.count:,}, {_megabytes(group.bytes)}"
    if report.entry_bytes:
        yield "entry memory", f"{_memory(report.entry_bytes)} for results and the shared workspace"
    pages = f"{cache.pages:,} pages of {cache.page_tokens} tokens"
    size = _megabytes(cache.pages * cache.page_bytes)
    if cache.window_tokens is not None:
        size = f"{size} at most, as layers with a window of {cache.window_tokens:,} tokens have fewer"
    yield "KV cache", f"{cache.type}, {cache.bytes_per_token:,} bytes a token; {pages}, {size}"
    yield "context", f"{cache.context_tokens:,} tokens"
    if manifest is not None:
        built_with = {"shortfin-llm": manifest.product_version, **manifest.versions}
        yield "built with", ", ".join(f"{name} {version}" for name, version in built_with.items())
        for index, line in enumerate(manifest.program.kernels):
            yield "" if index else "operations", line.partition(";")[0]  # the choice, without alternatives


def _programs(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield a (name, value) pair per program of an artefact for several devices, the best first."""
    for index, each in enumerate(manifest.programs if len(manifest.programs) > 1 else ()):
        sizes = ", ".join(
            f"{name} {_megabytes(manifest.files[name].size_bytes)}"
            for name in each.files
            if name in manifest.files
        )
        yield "" if index else "programs", f"{each.target.name}: {sizes}"


def _entries(report: Report) -> Table:
    made = Table(title="entries", title_justify="left")
    made.add_column("entry", no_wrap=True)
    made.add_column("arguments", overflow="fold")
    made.add_column("class")
    for name in ("batch", "tokens", "results", "workspace", "dispatches"):
        made.add_column(name, justify="right")
    if report.is_counted:
        made.add_column("of these with remarks", overflow="fold")
    found = {kernel.name: remarks(kernel) for kernel in report.kernels}
    for entry in report.entries:
        sizes = (
            entry.entry_class or "",
            *(_size(entry.rows), _size(entry.length)),
            *(_memory(entry.result_bytes), _memory(entry.workspace_bytes), _number(entry.num_dispatches)),
        )
        marked = [_remarks_of(entry, found)] if report.is_counted else []
        made.add_row(entry.name, _arguments(entry), *sizes, *marked)
    return made


def _arguments(entry: EntryFacts) -> str:
    if entry.arguments is None:
        return "not declared"
    return ", ".join(f"{name} {kind.removeprefix('tensor')}" for name, kind in entry.arguments.items())


def _remarks_of(entry: EntryFacts, found: dict[str, tuple[Remark, ...]]) -> str:
    """Describe how many of the entry's dispatches run a kernel with each remark."""
    launches = entry.launches or {}
    counts = {
        remark: sum(count for name, count in launches.items() if remark in found[name]) for remark in Remark
    }
    return ", ".join(f"{count} {remark}" for remark, count in counts.items() if count)


_COLUMNS = (
    *("kernels", "launches", "workgroup", "VGPRs", "AGPRs", "SGPRs", "spills", "LDS", "scratch"),
    *("waves", "matrix", "loads", "code"),
)


def _kernels(report: Report, show_all: bool) -> Iterator[RenderableType]:
    rows = _rows(report)
    shown = [row for row in rows if show_all or row.remarks]
    made = Table(title=_title(report, show_all), title_justify="left")
    made.add_column("kernel", overflow="fold")
    for name in _COLUMNS:
        made.add_column(name, justify="right")
    made.add_column("remarks", style="bold red")
    for row in shown:
        made.add_row(*_cells(row), ", ".join(row.remarks))
    if shown:
        yield made
        noted = {remark for row in shown for remark in row.remarks}
        yield "\n".join([LEGEND, *(f"  {each}: {each.meaning}" for each in Remark if each in noted)])
    if len(shown) < len(rows):
        num_others = sum(len(row.kernels) for row in rows) - sum(len(row.kernels) for row in shown)
        yield f"{num_others:,} kernels without a remark are not shown; `--all` shows them."


def _title(report: Report, show_all: bool) -> str:
    chip = report.code.chip if report.code else ""
    return f"kernels for {chip}" if show_all else f"kernels for {chip} with remarks"


def _rows(report: Report) -> list[Row]:
    groups: dict[KernelFacts, list[KernelFacts]] = {}
    for kernel in report.kernels:
        alike = replace(kernel, name=kernel.operation, num_sgprs=0, num_instructions=0)
        groups.setdefault(alike, []).append(kernel)
    rows = [Row(tuple(group), _launches(group, report)) for group in groups.values()]
    return sorted(rows, key=_order)


def _order(row: Row) -> tuple[object, ...]:
    """Return the sort key: most serious remark first, then most launches, then longest code."""
    gravest = list(Remark).index(row.remarks[0]) if row.remarks else len(Remark)
    return gravest, -(row.launches or 0), -row.num_instructions, row.kernels[0].name


def _launches(group: list[KernelFacts], report: Report) -> int | None:
    if not report.is_counted:
        return None
    names = [kernel.name for kernel in group]
    return max(sum((entry.launches or {}).get(name, 0) for name in names) for entry in report.entries)


def _cells(row: Row) -> tuple[str, ...]:
    """Return a table row without its last column, the remarks."""
    kernel = row.kernels[0]
    return (
        kernel.operation,
        f"{len(row.kernels):,}",
        _number(row.launches),
        "x".join(map(str, kernel.workgroup)) if kernel.workgroup else UNKNOWN,
        str(kernel.num_vgprs),
        _unless_zero(kernel.num_agprs),
        _range([each.num_sgprs for each in row.kernels]),
        _unless_zero(kernel.num_vgpr_spills + kernel.num_sgpr_spills),
        _unless_zero(kernel.lds_bytes),
        _unless_zero(kernel.scratch_bytes),
        f"{kernel.waves:g}",
        _unless_zero(kernel.num_matrix_instructions),
        _loads(kernel),
        _range([each.num_instructions for each in row.kernels]),
    )


def _loads(kernel: KernelFacts) -> str:
    if not kernel.loads:
        return ""
    return ", ".join(f"{count}x{width}" for width, count in reversed(kernel.loads))


LEGEND = """\
launches: the most in one invocation of an entry; VGPRs: with AGPRs where they share a file; LDS: bytes of a
workgroup; scratch: bytes of a lane; waves: those that a SIMD can hold at once; matrix: matrix instructions in
the code; loads: loads from global memory in the code, as count x bytes of a lane; code: instructions"""


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _size(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _unless_zero(value: int) -> str:
    return f"{value:,}" if value else ""


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _memory(size: int | None) -> str:
    if size is None:
        return "by call"
    return f"{size / 1e3:,.1f} kB" if size < 1e6 else _megabytes(size)
