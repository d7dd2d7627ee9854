"""Plots tokens/s and inter-token latency of both batching modes against the number of clients.

    pip install --group bench                          # matplotlib
    python bench/concurrency.py DIR                    # writes concurrency.json and concurrency.svg
    python bench/concurrency.py --from FILE.json       # only draws

DIR is an artefact of `shortfin-llm build`. A server in each mode is measured in turns at every number of
clients; each client sends two requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mode_servers import MODES, bench, mode_servers

CONCURRENCY = "1,2,4,8,16,32,64"


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Draw two panels over the number of clients: output tokens/s; ITL, median and 99th percentile."""
    import matplotlib.pyplot as plt  # in the dependency group `bench`, not needed for measuring

    clients = [workload["concurrency"] for workload in document["workloads"]]
    figure, (throughput, latency) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, (label, mode) in enumerate(MODES.items()):
        line = {"color": f"C{color}", "marker": "o"}
        throughput.plot(clients, series(document, label, "output_tokens_per_s"), label=mode, **line)
        latency.plot(clients, series(document, label, "itl_ms_p50"), label=f"{mode}, median", **line)
        latency.plot(
            clients, series(document, label, "itl_ms_p99"), label=f"{mode}, p99", linestyle="--", **line
        )
    throughput.set(title="Output tokens/s", ylim=(0, None))
    latency.set(title="Inter-token latency, ms", yscale="log")
    for axes in (throughput, latency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(number) for number in clients])
        axes.set_xlabel("clients")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(file)


def series(document: Mapping[str, Any], label: str, figure: str) -> Sequence[float]:
    """Return one server's medians, in the order of the workloads."""
    found = {m["workload"]: m[figure] for m in document["medians"] if m["target"] == label}
    return [found[workload["name"]] for workload in document["workloads"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--from", dest="measured", type=Path, metavar="FILE", help="draw an earlier run")
    parser.add_argument("--output", type=Path, default=Path("concurrency"), help="path without its ending")
    parser.add_argument("--concurrency", default=CONCURRENCY, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="(default: %(default)s)")
    arguments = parser.parse_args()
    if (arguments.artifact is None) == (arguments.measured is None):
        parser.error("name the model directory to measure, or the JSON to draw with --from")
    measured = arguments.measured or arguments.output.with_suffix(".json")
    if arguments.artifact is not None:
        with mode_servers(arguments.artifact) as servers:
            bench(
                servers,
                f"--concurrency={arguments.concurrency}",
                f"--prompt-tokens={arguments.prompt_tokens}",
                f"--output-tokens={arguments.output_tokens}",
                f"--repeat={arguments.repeat}",
                f"--json={measured}",
            )
    draw(json.loads(measured.read_text(encoding="utf-8")), arguments.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
