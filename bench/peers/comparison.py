"""The comparison table: each server's figures, and ratios of ours to the best peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

Figures = Mapping[str, Any]

OURS = "ours"  # also the prefix of labels of our server with other settings
TOKENS_PER_S, TTFT, ITL_P99 = "output_tokens_per_s", "ttft_ms_p50", "itl_ms_p99"
# The figures with a ratio, and how to select the best peer.
RATIOS = {TOKENS_PER_S: max, TTFT: min, ITL_P99: min}


def is_ours(label: str) -> bool:
    return label.split("-")[0] == OURS


def ratio(
    runs: Sequence[Figures], workload: str, figure: str, label: str = OURS
) -> tuple[float, float, float] | None:
    """Return ours over the best peer of the same repeat: median, minimum, maximum; None without both."""
    found = list(_ratios(runs, workload, figure, label))
    return (median(found), min(found), max(found)) if found else None


def _ratios(runs: Sequence[Figures], workload: str, figure: str, label: str) -> Iterator[float]:
    chosen = [run for run in runs if run["workload"] == workload and run[figure] is not None]
    for repeat in sorted({run["repeat"] for run in chosen}):
        values = {run["target"]: run[figure] for run in chosen if run["repeat"] == repeat}
        peers = [value for target, value in values.items() if not is_ours(target)]
        if label in values and peers:
            yield values[label] / RATIOS[figure](peers)


def comparison_table(doc: Figures) -> Table:
    """Return a table with one line per workload and server; lines of our server have ratios."""
    table = Table(
        title=f"{doc['model']}, {doc['weights']}, {doc['threads']} threads; ratios: ours / best peer"
    )
    for heading in ("workload", "server"):
        table.add_column(heading)
    for heading in ("output tok/s", "ratio", "TTFT p50 ms", "ratio", "ITL p50 ms", "ITL p99 ms", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("peak RSS MB", justify="right")
    for row in doc["medians"]:
        table.add_row(*_cells(doc, row))
    return table


def _cells(doc: Figures, row: Figures) -> list[str]:
    workload, label = row["workload"], row["target"]
    ratios = {
        figure: _range(ratio(doc["runs"], workload, figure, label)) if is_ours(label) else ""
        for figure in RATIOS
    }
    return [
        workload,
        label,
        _number(row[TOKENS_PER_S]),
        ratios[TOKENS_PER_S],
        _number(row[TTFT]),
        ratios[TTFT],
        _number(row["itl_ms_p50"]),
        _number(row[ITL_P99]),
        ratios[ITL_P99],
        f"{doc['servers'][label]['peak_memory_bytes'] / 1e6:,.0f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{1 if value < 100 else 0}f}"


def _range(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    middle, minimum, maximum = found
    return f"{middle:.2f}" if minimum == maximum else f"{middle:.2f} ({minimum:.2f} to {maximum:.2f})"
