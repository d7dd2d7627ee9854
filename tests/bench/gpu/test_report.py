from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench.gpu.plot import Line, write_plot
from bench.gpu.report import document, throughput, write_report

MACHINE = {
    "part": "machine", "pack": {"commit": "abc1234"}, "device": "cuda", "gpus": ["NVIDIA H200, 580"],
    "iree": "3.13", "at": "2026-11-22T17:00:00Z",
}  # fmt: skip
ENTRY = {
    "part": "entries", "model": "m", "entry": "decode_bs8", "rows": 8, "new_tokens": 8, "context": 256,
    "run_ms": 3.0, "sync_ms": 2.5, "queued_ms": 2.0, "tokens_per_s": 4000.0,
}  # fmt: skip
PREFILL = {**ENTRY, "entry": "prefill_bs8"}
ENGINE = {
    "part": "engine", "model": "m", "depth": 0, "sampling": "greedy", "requests": 8,
    "context": 256, "steps": 60, "step_ms": 5.0, "host_ms": 0.5, "tokens_per_s": 1600.0,
}  # fmt: skip


MIXED = {
    "part": "mixed", "model": "m", "mode": "default", "depth": 1, "sampling": "whole vocabulary",
    "requests": 64, "steps": 99, "step_ms": 5.0, "step_ms_p99": 9.0, "host_ms": 0.5, "ahead": 0.987,
    "discarded_tokens": 128, "requests_per_s": 31.25, "tokens_per_s": 2000.0, "busy": 0.97,
}  # fmt: skip


def text_of(*records: dict[str, Any]) -> str:
    return "\n".join(document(records))


def test_a_step_is_compared_with_the_decode_entry_of_as_many_rows() -> None:
    text = text_of(MACHINE, PREFILL, {**ENTRY, "rows": 1, "queued_ms": 0.1}, ENTRY, ENGINE)
    assert "| m | 8 | 0 | greedy | 5.00 | 0.50 | 1,600 | 2.00 | 2.50 | 3.00 |" in text


def test_a_step_of_a_decode_loop_is_compared_with_its_own_entry() -> None:
    loop = {**ENTRY, "entry": "decode_loop_bs8", "sync_ms": 4.0, "queued_ms": 1.0}
    text = text_of(MACHINE, ENTRY, loop, {**ENGINE, "depth": 1})
    assert "| m | 8 | 1 | greedy | 5.00 | 0.50 | 1,600 | 1.25 | 5.00 | 4.00 |" in text


def test_a_step_without_its_entry_has_no_ratio() -> None:
    assert "| m | 8 | 0 | greedy | 5.00 | 0.50 | 1,600 |  |  |  |" in text_of(MACHINE, ENGINE)


def test_mixed_traffic_is_compared_with_plain_requests_at_the_same_depth() -> None:
    penalised = {**MIXED, "sampling": "presence penalty", "tokens_per_s": 1900.0, "busy": None}
    text = text_of(MACHINE, {**MIXED, "depth": 0, "tokens_per_s": 999.0}, MIXED, penalised)
    times = "5.00 / 9.00 | 0.50 | 99% | 128 | 31.2"
    assert f"| m | 64 | default | 1 | presence penalty | {times} | 1,900 | 0.95 |  |" in text
    assert "| 2,000 | 1.00 | 97% |" in text


def test_parts_without_results_have_no_table() -> None:
    text = text_of(MACHINE, ENTRY)
    assert "## Entries" in text
    assert "## HTTP server" not in text
    assert text.startswith("NVIDIA H200, 580; IREE 3.13")


def test_parts_that_failed_or_were_left_out_are_named() -> None:
    text = text_of(
        MACHINE,
        {"part": "failed", "parts": ["http"], "model": "m", "why": "status 1"},
        {"part": "skipped", "parts": ["entries", "engine"], "model": "n"},
    )
    assert "| m | http | status 1 |" in text
    assert "| n | entries, engine | the time was over before it |" in text


def test_throughput_has_a_line_for_each_way_that_was_measured() -> None:
    static = {"part": "transformers", "model": "m", "kind": "static", "rows": 8, "tokens_per_s": 900.0}
    lines = throughput([MACHINE, ENTRY, PREFILL, ENGINE, static], "m")
    assert lines == [
        Line("decode_bs*, queued", [(8, 4000.0)]),
        Line("engine, depth 0", [(8, 1600.0)]),
        Line("transformers", [(8, 900.0)]),
    ]


def test_a_report_is_written_from_the_results_so_far(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, (MACHINE, ENTRY, ENGINE))))
    write_report(results, tmp_path)
    assert "decode_bs8" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "m.svg").exists()


def test_a_plot_is_an_svg_with_rising_lines(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    write_plot(file, "a < b", [Line("line", [(1, 10.0), (8, 1000.0)]), Line("point", [(8, 55.0)])])
    root = ElementTree.parse(file).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "1", "8", "10", "100", "1,000", "line", "point"} <= set(texts)
    [first, *_] = [e.get("d", "") for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("fill")]
    (x1, y1), (x2, y2) = (map(float, point.split()) for point in first.removeprefix("M").split("L"))
    assert x1 < x2
    assert y1 > y2  # downwards in SVG
