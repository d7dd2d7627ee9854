"""Compares the two batching modes on the same model: W1, W2 and W3, and the share of padding rows.

    python bench/modes.py DIR            # an artefact of `shortfin-llm build`; --repeat 3

Starts a server in each mode and measures them alternately. Prints `shortfin-llm bench`'s tables for each
workload, and then a table for `bench/README.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mode_servers import MODES, bench, counted_since, counters, mode_servers

BASELINE, OTHER = MODES
COLUMNS = ("workload", "output tok/s", "ratio", "ITL p99 ms", "ratio", "padding", "steps", "plans", "rows")


def measure(servers: Mapping[str, str], workload: str, repeat: int, folder: Path) -> dict[str, Any]:
    """Return the bench's results, and the counters of each server during it."""
    file = folder / f"{workload}.json"
    before = {label: counters(url) for label, url in servers.items()}
    bench(servers, f"--preset={workload}", f"--repeat={repeat}", f"--json={file}")
    computed = {label: counted_since(before[label], url) for label, url in servers.items()}
    return {"bench": json.loads(file.read_text(encoding="utf-8")), "computed": computed}


def row(workload: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a table row: pairs have the default mode first, ratios are extend-attention over default."""
    medians = {median["target"]: median for median in result["bench"]["medians"]}
    (ratios,) = result["bench"]["ratios"]
    computed = [result["computed"][label] for label in MODES]
    return (
        workload,
        _pair(medians, "output_tokens_per_s"),
        _ratio(ratios["output_tokens_per_s"]),
        _pair(medians, "itl_ms_p99"),
        _ratio(ratios["itl_ms_p99"]),
        ", ".join(f"{padding_share(counts):.1%}" for counts in computed),
        ", ".join(f"{counts['shortfin_llm:steps_total']:.0f}" for counts in computed),
        ", ".join(f"{counts['shortfin_llm:plans_total']:.0f}" for counts in computed),
        ", ".join(f"{counts['shortfin_llm:patched_rows_total']:.0f}" for counts in computed),
    )


def padding_share(computed: Mapping[str, float]) -> float:
    """Return the share of padding in the computed rows."""
    return computed["padding"] / sum(computed[kind] for kind in ("prefill", "decode", "padding"))


def _pair(medians: Mapping[str, Mapping[str, float]], figure: str) -> str:
    return ", ".join(f"{medians[label][figure]:.0f}" for label in MODES)


def _ratio(ratio: tuple[float, float, float]) -> str:
    median, lowest, highest = ratio
    return f"{median:.2f} ({lowest:.2f} to {highest:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument("--workloads", default="W1,W2,W3", help="presets (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    arguments = parser.parse_args()
    with mode_servers(arguments.artifact) as servers, TemporaryDirectory() as folder:
        results = {
            workload: measure(servers, workload, arguments.repeat, Path(folder))
            for workload in arguments.workloads.split(",")
        }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nof each pair {BASELINE} first; ratios are {OTHER} over {BASELINE}, pass by pass\n")
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *(row(*item) for item in results.items())):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
