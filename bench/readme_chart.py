"""Draws the chart of the README from figures in docs/measurements.md.

uv run --with matplotlib python bench/readme_chart.py docs/throughput.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Series = dict[str, list[float]]

OURS, FIRST_PEER, SECOND_PEER = "#e8964a", "#5ab4d6", "#9aa5ab"

# Output tok/s of SmolLM2-135M in bf16 ("Against other servers").
CPU_WORKLOADS = ["1 client", "8 clients", "32 clients", "16 clients,\nshared prefix"]
CPU: Series = {
    "shortfin-llm": [81, 460, 488, 595],
    "vLLM": [33, 209, 371, 326],
    "llama.cpp": [46, 99, 59, 53],
}
# Milliseconds of a decode step of a 135M model in bf16 ("NVIDIA H200").
GPU_ROWS = ["1", "8", "32", "128"]
GPU: Series = {
    "shortfin-llm": [0.90, 0.94, 1.00, 1.27],
    "torch.compile": [2.43, 2.06, 2.33, 3.81],
}


def bars(axes: Axes, groups: list[str], series: Series, digits: int) -> None:
    """Draws one bar for each group and series, with its value above it."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        colour = (OURS, FIRST_PEER, SECOND_PEER)[index]
        drawn = axes.bar(places, values, width, label=name, color=colour)
        axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "shortfin-llm"  # the same file from the same figures
    figure, (cpu, gpu) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=[3, 2])
    bars(cpu, CPU_WORKLOADS, CPU, digits=0)
    cpu.set_title("CPU: output tokens/s, higher is better", fontsize=9)
    cpu.set_ylim(top=760)
    bars(gpu, GPU_ROWS, GPU, digits=2)
    gpu.set_title("H200: ms per decode step by batch size, lower is better", fontsize=9)
    gpu.set_ylim(top=5)
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]), metadata={"Date": None})


if __name__ == "__main__":
    main()
