"""The results of a run, as a JSON document and as tables."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shortfin_apps.llm import __version__
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.load import PassResult
from shortfin_apps.llm.tools.bench.stats import Histogram, median_figures, paired_ratios, side_by_side
from shortfin_apps.llm.tools.bench.target import Target
from shortfin_apps.llm.tools.bench.workload import Workload

SCHEMA = "shortfin-llm-bench/1"
BESIDE_WIDTH = 100  # minimum columns for two histograms side by side
Figures = Mapping[str, Any]
Key = tuple[str, str]  # (server's label, workload's name)

_COLUMNS = (
    "req/s",
    "output tok/s",
    "total tok/s",
    "TTFT",
    "ITL",
    "TPOT",
    "latency",
    "cached",
    "errors",
    "client CPU",
)
_RATIO_COLUMNS = {
    "output_tokens_per_s": "output tok/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "TTFT p99",
    "itl_ms_p50": "ITL p50",
    "itl_ms_p99": "ITL p99",
    "tpot_ms_p50": "TPOT p50",
    "latency_ms_p50": "latency p50",
}


def document(
    targets: Sequence[Target],
    workloads: Sequence[Workload],
    results: Sequence[PassResult],
    seed: str,
    started: datetime,
) -> dict[str, Any]:
    """Return the JSON document of a run: all passes, medians over repeats, ratios to the first server."""
    runs = [
        {"target": r.target, "workload": r.workload, "repeat": r.repeat, **asdict(r.summary)} for r in results
    ]
    return {
        "schema": SCHEMA,
        "version": __version__,
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "seed": seed,
        "targets": [{"label": t.label, "url": t.url, "model": t.model} for t in targets],
        "workloads": [asdict(workload) for workload in workloads],
        "runs": runs,
        "medians": [
            {"target": target, "workload": workload, **median_figures(group)}
            for (target, workload), group in _grouped(runs).items()
        ],
        "ratios": _ratios(runs, [t.label for t in targets]),
    }


def _ratios(runs: Sequence[Figures], labels: Sequence[str]) -> list[dict[str, Any]]:
    groups = _grouped(runs)
    baseline = labels[0]
    return [
        {
            "target": target,
            "baseline": baseline,
            "workload": workload,
            **paired_ratios(group, groups.get((baseline, workload), [])),
        }
        for (target, workload), group in groups.items()
        if target != baseline
    ]


def _grouped(runs: Iterable[Figures]) -> dict[Key, list[Figures]]:
    """Group passes by server and workload, each group in the order of its repeats."""
    groups: dict[Key, list[Figures]] = {}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        groups.setdefault((run["target"], run["workload"]), []).append(run)
    return groups


def read_document(file: Path) -> dict[str, Any]:
    """Read the JSON document of an earlier run. Raises InvalidRequestError for any other file."""
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"cannot read {file} as JSON ({error})", "compare") from error
    if not isinstance(earlier, dict) or earlier.get("schema") != SCHEMA:
        raise InvalidRequestError(f"{file} was not written by `shortfin-llm bench --json`", "compare")
    try:
        compare(earlier, earlier)
        str(earlier["started"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InvalidRequestError(
            f"{file} was changed since `shortfin-llm bench --json` wrote it ({error!r})", "compare"
        ) from error
    return earlier


def compare(now: Figures, earlier: Figures) -> list[dict[str, Any]]:
    """Return the ratios of medians, `now / earlier`, for each server and workload that both runs have.

    Servers are matched by label. If the earlier run has only one server, every server is compared with it.
    """
    before = {(m["target"], m["workload"]): m for m in earlier["medians"]}
    labels = [target["label"] for target in earlier["targets"]]
    rows = []
    for new in now["medians"]:
        label = labels[0] if len(labels) == 1 else new["target"]
        if old := before.get((label, new["workload"])):
            ratios = paired_ratios([new], [old])
            rows.append({"target": new["target"], "workload": new["workload"], **ratios})
    return rows


def print_report(console: Console, doc: Figures, histograms: bool = False) -> None:
    """Print the table of medians, the histograms if requested, the ratios between servers, and warnings."""
    console.print(_table(doc))
    if histograms:
        _print_histograms(console, doc)
    if doc["ratios"]:
        console.print(
            ratio_table(
                doc["ratios"], f"ratios to {doc['ratios'][0]['baseline']}, pass by pass: median (min to max)"
            )
        )
    for line in _remarks(doc["runs"]):
        console.print(line, highlight=False)


def _print_histograms(console: Console, doc: Figures) -> None:
    """Print histograms of TTFT and ITL for each workload and server, over all repeats."""
    groups = _grouped(doc["runs"])
    for row in sorted(doc["medians"], key=lambda m: _order(doc, m)):
        workload, target = row["workload"], row["target"]
        drawn = [
            Histogram(
                f"{figure.upper()} of {workload} on {target}",
                [b for run in groups[target, workload] for b in run[f"{figure}_ms_histogram"]],
            )
            for figure in ("ttft", "itl")
        ]
        if console.width >= BESIDE_WIDTH:
            console.print(side_by_side(drawn))
        else:
            console.print(*drawn)
        console.print()


def _table(doc: Figures) -> Table:
    repeats = max((run["repeat"] for run in doc["runs"]), default=0) + 1
    medians = f"medians of {repeats} repeats, " if repeats > 1 else ""
    table = Table(title=f"{medians}times in ms as p50 / p99")
    for heading in ("workload", "server"):
        table.add_column(heading)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    groups = _grouped(doc["runs"])
    for median in sorted(doc["medians"], key=lambda m: _order(doc, m)):
        table.add_row(*_cells(median, groups[median["target"], median["workload"]]))
    return table


def _cells(median: Figures, runs: Sequence[Figures]) -> list[str]:
    """Return a table row of medians, share of cached prompt tokens, errors and client CPU share.

    Many cached tokens or a busy client explain unusual figures in the other columns.
    """
    times = [
        f"{_number(median[f'{figure}_ms_p50'])} / {_number(median[f'{figure}_ms_p99'])}"
        for figure in ("ttft", "itl", "tpot", "latency")
    ]
    return [
        median["workload"],
        median["target"],
        _number(median["requests_per_s"], 2),
        _number(median["output_tokens_per_s"]),
        _number(median["total_tokens_per_s"]),
        *times,
        f"{sum(r['cached_tokens'] for r in runs) / (sum(r['prompt_tokens'] for r in runs) or 1):.0%}",
        str(sum(run["errors"] for run in runs)),
        f"{max(run['client_cpu_share'] for run in runs):.0%}",
    ]


def _order(doc: Figures, row: Figures) -> tuple[int, int]:
    """Return the sort key of a table row: by workload, then by server, so that servers are adjacent."""
    workloads = list(dict.fromkeys(run["workload"] for run in doc["runs"]))
    labels = [target["label"] for target in doc["targets"]]
    return workloads.index(row["workload"]), labels.index(row["target"])


def ratio_table(rows: Sequence[Figures], title: str) -> Table:
    """Create a table of the ratios from `paired_ratios`. Above 1 is better for tokens/s, worse for times."""
    table = Table(title=title)
    table.add_column("workload")
    table.add_column("server")
    for heading in _RATIO_COLUMNS.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["workload"], row["target"], *(_ratio(row[figure]) for figure in _RATIO_COLUMNS))
    return table


def _remarks(runs: Sequence[Figures]) -> list[str]:
    """Return warnings about failed requests and short answers, which make the figures unreliable."""
    remarks = []
    for (target, workload), group in _grouped(runs).items():
        where = f"{workload} on {target}"
        messages: Counter[str] = Counter()
        for run in group:
            messages.update(run["error_messages"])
        remarks += [f"{where}: {n} requests failed: {message}" for message, n in messages.most_common()]
        if short := sum(run["short_answers"] for run in group):
            remarks.append(
                f"{where}: {short} answers were shorter than requested; does it support ignore_eos?"
            )
    return remarks


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits if value < 100 else 0}f}"  # no more digits than the noise allows


def _ratio(ratio: tuple[float, float, float] | None) -> str:
    if ratio is None:
        return "-"
    middle, minimum, maximum = ratio
    return f"{middle:.2f}" if minimum == maximum else f"{middle:.2f} ({minimum:.2f} to {maximum:.2f})"
