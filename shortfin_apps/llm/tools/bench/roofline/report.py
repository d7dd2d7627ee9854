"""The results of a roofline run, as a JSON document and as tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from shortfin_apps.llm import __version__
from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS, Limits
from shortfin_apps.llm.tools.bench.roofline.cases import Case
from shortfin_apps.llm.tools.bench.roofline.counts import Counts
from shortfin_apps.llm.tools.bench.roofline.measure import Result
from shortfin_apps.llm.tools.bench.roofline.profile import Share

MIN_SHARE = 0.005  # a profile's table omits smaller shares
SCHEMA = "shortfin-llm-roofline/1"
COUNTS_SCHEMA = "shortfin-llm-roofline-counts/1"


def document(
    manifest: Manifest, results: Sequence[Result], profiles: Sequence[Sequence[Share]] | None
) -> dict[str, Any]:
    """Return the JSON document of a timed run: times in seconds, speeds per second.

    `profiles`, if given, has one list of shares per result, in the same order.
    """
    entries = [_entry(result) for result in results]
    for entry, shares in zip(entries, profiles or (), strict=False):
        entry["profile"] = [asdict(share) for share in shares]
    return {
        **_header(SCHEMA, manifest),
        "target": {"device": manifest.program.target.device, "cpu": manifest.program.target.cpu},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "entries": entries,
    }


def counts_document(manifest: Manifest, results: Sequence[Counts]) -> dict[str, Any]:
    """Return the JSON document of a run on the emulated GPU.

    `floor_s` and `shortest_s` are minimum times at the peaks in `limits`.
    """
    chip = CHIPS[manifest.program.target.cpu]
    return {
        **_header(COUNTS_SCHEMA, manifest),
        "chip": chip.name,
        "limits": asdict(chip.limits),
        "most_waves": chip.resources.waves,
        "entries": [_counts_entry(result, chip.limits) for result in results],
    }


def _header(schema: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "schema": schema,
        "version": __version__,
        "model": manifest.spec.name,
        "weights": manifest.options.weights,
    }


def _case(case: Case) -> dict[str, Any]:
    return {
        "entry": case.entry,
        "rows": case.plan.rows,
        "new_tokens": case.plan.new_tokens,
        "context": case.plan.context,
    }


def _counts_entry(result: Counts, limits: Limits) -> dict[str, Any]:
    work = result.work
    return {
        **_case(result.case),
        "launches": result.launches,
        "bytes": result.num_bytes,
        "floor_bytes": work.num_bytes,
        "matrix_flops": result.matrix_flops,
        "floor_flops": work.flops,
        "lds_conflict_cycles": result.lds_conflict_cycles,
        "waves": result.waves,
        "kernels": [asdict(kernel) for kernel in result.kernels],
        "bytes_ratio": result.bytes_ratio,
        "matrix_ratio": result.matrix_ratio,
        "floor_s": work.floor_s(limits.bytes_per_s, limits.flops_per_s),
        "shortest_s": result.shortest_s(limits),
    }


def counts_table(doc: dict[str, Any]) -> Table:
    bytes_and_flops = ("launches", "MB", "of floor", "matrix GFLOP", "of floor", "LDS conflicts", "waves")
    made = _entry_table(f"{_title(doc)}, {doc['chip']}, emulated", *bytes_and_flops, "floor us", "at least")
    for entry in doc["entries"]:
        made.add_row(
            *_case_cells(entry),
            f"{entry['launches']:,}",
            f"{entry['bytes'] / 1e6:,.2f}",
            f"{entry['bytes_ratio']:.2f}",
            f"{entry['matrix_flops'] / 1e9:,.2f}",
            f"{entry['matrix_ratio']:.2f}",
            f"{entry['lds_conflict_cycles']:,}",
            _waves(entry["waves"], doc["most_waves"]),
            _us(entry["floor_s"]),
            _us(entry["shortest_s"]),
        )
    return made


def _waves(waves: float | None, most: int) -> str:
    return "" if waves is None else f"{waves:.1f} of {most}"


def limits_line(doc: dict[str, Any]) -> str:
    """Return one line that states the peaks from which the times in `counts_table` were computed."""
    limits = doc["limits"]
    return (
        f"times at the peaks of {limits['product']}, {limits['bytes_per_s'] / 1e12:.2f} TB/s and "
        f"{limits['flops_per_s'] / 1e12:,.0f} TFLOP/s, without launches, waits and conflicts"
    )


def _entry(result: Result) -> dict[str, Any]:
    samples = result.samples
    return {
        **_case(result.case),
        "phase": result.case.plan.family.value,
        "bytes": result.work.num_bytes,
        "flops": result.work.flops,
        "bound": "memory" if result.is_memory_bound else "arithmetic",
        "bytes_per_s": [sample.bytes_per_s for sample in samples],
        "flops_per_s": [sample.flops_per_s for sample in samples],
        "time_s": [sample.time_s for sample in samples],
        "time_s_median": result.time_s,
        "time_s_min": result.min_time_s,
        "floor_s": result.floor_s,
        "ratio": median(result.ratios),
        "ratio_min": min(result.ratios),
        "ratio_max": max(result.ratios),
    }


def speeds(doc: dict[str, Any]) -> str:
    """Return one line with the bandwidths and matmul speeds that the probes measured in this run."""
    bandwidths = [value for entry in doc["entries"] for value in entry["bytes_per_s"]]
    peaks = [value for entry in doc["entries"] for value in entry["flops_per_s"]]
    return (
        f"streaming reads {_range(bandwidths, 1e9)} GB/s, {doc['weights']} matmul {_range(peaks, 1e9)} "
        "GFLOP/s (median, min to max)"
    )


def table(doc: dict[str, Any]) -> Table:
    columns = ("time ms", "min ms", "floor ms", "bound by", "ratio", "min to max")
    made = _entry_table(f"{_title(doc)}, {doc['target']['cpu']}", *columns)
    for entry in doc["entries"]:
        made.add_row(
            *_case_cells(entry),
            _ms(entry["time_s_median"]),
            _ms(entry["time_s_min"]),
            _ms(entry["floor_s"]),
            entry["bound"],
            f"{entry['ratio']:.2f}",
            f"{entry['ratio_min']:.2f} to {entry['ratio_max']:.2f}",
        )
    return made


def profile_tables(doc: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of CPU time per dispatch for each entry that has a profile."""
    for entry in doc["entries"]:
        if "profile" not in entry:
            continue
        title = f"{entry['entry']}, {entry['rows']} x {entry['new_tokens']}, context {entry['context']:,}"
        made = Table("dispatch", title=title, title_justify="left")
        for name in ("CPU ms, all threads", "share"):
            made.add_column(name, justify="right")
        for share in entry["profile"]:
            if share["share"] >= MIN_SHARE:
                made.add_row(share["name"], _ms(share["cpu_s"]), f"{share['share']:.1%}")
        yield made


def _title(doc: dict[str, Any]) -> str:
    return f"{doc['model']}, {doc['weights']}"


def _entry_table(title: str, *numbers: str) -> Table:
    """Create a table: the columns of `_case_cells`, then a right-aligned column per name in `numbers`."""
    made = Table(title=title, title_justify="left")
    for name in ("entry", "rows x tokens", "context"):
        made.add_column(name)
    for name in numbers:
        made.add_column(name, justify="right")
    return made


def _case_cells(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["entry"], f"{entry['rows']} x {entry['new_tokens']}", f"{entry['context']:,}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def _range(values: Sequence[float], unit: float) -> str:
    return f"{median(values) / unit:.1f} ({min(values) / unit:.1f} to {max(values) / unit:.1f})"
