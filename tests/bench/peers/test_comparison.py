from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bench.peers.comparison import ITL_P99, TOKENS_PER_S, TTFT, comparison_table, ratio


def run(target: str, repeat: int, speed: float, ttft: float, itl: float | None = 10.0) -> dict[str, Any]:
    figures = {TOKENS_PER_S: speed, TTFT: ttft, "itl_ms_p50": itl, ITL_P99: itl}
    return {"target": target, "workload": "W2", "repeat": repeat, **figures}


# llama is the quicker peer in the first repeat, vllm in the second; vllm always answers first.
RUNS = [
    run("ours", 0, 300, 50),
    run("llama", 0, 200, 200),
    run("vllm", 0, 100, 100),
    run("ours", 1, 200, 60),
    run("llama", 1, 50, 300),
    run("vllm", 1, 80, 60),
]


def test_ours_is_compared_with_the_best_peer_of_each_repeat() -> None:
    assert ratio(RUNS, "W2", TOKENS_PER_S) == pytest.approx((2.0, 1.5, 2.5))
    assert ratio(RUNS, "W2", TTFT) == pytest.approx((0.75, 0.5, 1.0))


def test_ours_with_other_settings_is_not_a_peer() -> None:
    runs = [*RUNS, run("ours-default", 0, 400, 20), run("ours-default", 1, 100, 30)]
    assert ratio(runs, "W2", TOKENS_PER_S) == pytest.approx((2.0, 1.5, 2.5))
    assert ratio(runs, "W2", TOKENS_PER_S, "ours-default") == pytest.approx((1.625, 1.25, 2.0))


def test_without_peers_or_figures_there_is_no_ratio() -> None:
    assert ratio(RUNS[:1], "W2", TOKENS_PER_S) is None
    assert ratio(RUNS[1:3], "W2", TOKENS_PER_S) is None
    assert ratio([run("ours", 0, 1, 1, None), run("llama", 0, 1, 1, None)], "W2", ITL_P99) is None


def test_the_table_has_the_ratios_in_our_line() -> None:
    doc = {
        "model": "tiny",
        "weights": "bf16",
        "threads": 2,
        "runs": RUNS,
        "medians": [RUNS[0], RUNS[1]],
        "servers": {"ours": {"peak_memory_bytes": 1.2e9}, "llama": {"peak_memory_bytes": 3e9}},
    }
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(comparison_table(doc))
    ours, llama = (
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
        if "W2" in line
    )
    assert ours[:4] == ["W2", "ours", "300", "2.00 (1.50 to 2.50)"]
    assert ours[-1] == "1,200"
    assert llama[:4] == ["W2", "llama", "200", ""]
