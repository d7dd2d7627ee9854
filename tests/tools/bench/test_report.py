from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from typing import Any, cast

import httpx
from rich.console import Console

from shortfin_apps.llm.tools.bench.load import PassResult
from shortfin_apps.llm.tools.bench.report import compare, document, print_report
from shortfin_apps.llm.tools.bench.stats import FIGURES, RequestRecord, summarise
from shortfin_apps.llm.tools.bench.target import Target, text_prompt

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def passed(target: str, repeat: int, ttft_s: float, workload: str = "W1") -> PassResult:
    taken = RequestRecord(sent_s=0.0, ended_s=2 * ttft_s, chunks_s=(ttft_s, 2 * ttft_s), output_tokens=2)
    return PassResult(target, workload, repeat, summarise([taken]))


def made(*results: PassResult) -> dict[str, Any]:
    labels = list(dict.fromkeys(result.target for result in results))
    with_no_connection = cast(httpx.AsyncClient, None)
    targets = [Target(label, "http://x", None, with_no_connection, text_prompt) for label in labels]
    return document(targets, [], results, "seed", NOON)


def test_medians_are_over_repeats_and_ratios_within_them() -> None:
    doc = made(
        passed("a", 0, 0.010),
        passed("b", 0, 0.020),
        passed("b", 1, 0.060),
        passed("a", 1, 0.030),
    )
    assert {m["target"]: round(m["ttft_ms_p50"], 6) for m in doc["medians"]} == {"a": 20.0, "b": 40.0}
    (ratio,) = doc["ratios"]
    assert [round(x, 6) for x in ratio["ttft_ms_p50"]] == [2.0, 2.0, 2.0]
    assert ratio["baseline"] == "a"


def test_an_earlier_run_of_one_server_is_compared_with_all() -> None:
    now = made(passed("new", 0, 0.030), passed("old", 0, 0.020))
    rows = compare(now, made(passed("it", 0, 0.010)))
    assert [(row["target"], row["workload"]) for row in rows] == [("new", "W1"), ("old", "W1")]
    assert [round(row["ttft_ms_p50"][0], 6) for row in rows] == [3.0, 2.0]
    assert rows[0].keys() == {"target", "workload", *FIGURES}


def test_runs_of_several_servers_are_compared_by_label_and_workload() -> None:
    now = made(passed("a", 0, 0.010), passed("b", 0, 0.020), passed("b", 0, 0.020, "W2"))
    earlier = made(passed("b", 0, 0.010), passed("c", 0, 0.010), passed("b", 0, 0.040, "W5"))
    assert [(row["target"], row["workload"]) for row in compare(now, earlier)] == [("b", "W1")]


def test_the_report_shows_servers_of_a_workload_together() -> None:
    doc = made(*(passed(t, 0, 0.01, w) for t in "ab" for w in ("W1", "W2")))
    out = StringIO()
    print_report(Console(file=out, width=160), doc)
    table, ratios = out.getvalue().split("ratios to a")
    rows = [line.split()[1:4:2] for line in table.splitlines() if "W" in line and "│" in line]
    assert rows == [["W1", "a"], ["W1", "b"], ["W2", "a"], ["W2", "b"]]
    assert ratios.count("1.00") == 2 * 7
