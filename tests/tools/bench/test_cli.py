from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.cli import main
from shortfin_apps.llm.tools.bench.cli import draws_histograms
from shortfin_apps.llm.tools.bench.report import SCHEMA
from tests.scripted_server import ScriptedServer, completes, says

CUSTOM = ["--prompt-tokens", "8", "--output-tokens", "2", "--concurrency", "1,2", "--text-prompts"]


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.on("/v1/models", says({"data": [{"id": "tiny"}]}))
    server.on("/v1/completions", completes(["x", "y"]))
    return server


def bench(*argv: str) -> int:
    return main(["bench", *argv])


def test_a_run_prints_a_table(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", server.url, *CUSTOM) == 0
    out = capsys.readouterr().out
    assert "output tok/s" in out
    assert [line.split()[1] for line in out.splitlines() if "127.0.0.1" in line] == ["C1", "C2"]


def test_histograms_are_drawn_if_asked(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", f"it={server.url}", *CUSTOM, "--histogram", "--repeat", "2") == 0
    out = capsys.readouterr().out
    assert "TTFT of C1 on it in ms, 4 times" in out
    assert "ITL of C2 on it in ms, 8 times" in out


def test_elsewhere_than_on_a_terminal_there_are_none_unasked(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--url", f"it={server.url}", *CUSTOM) == 0
    assert "in ms," not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_terminal", "chosen", "draws"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_histograms_are_for_terminals_unless_chosen(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, chosen: bool | None, draws: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert draws_histograms(chosen) == draws


def test_json_on_stdout_is_the_whole_run(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["--url", f"one={server.url}", "--url", f"two={server.url}"]
    assert bench(*urls, *CUSTOM, "--repeat", "2", "--json", "-") == 0
    doc = json.loads(capsys.readouterr().out)
    assert doc["schema"] == SCHEMA
    assert [target["label"] for target in doc["targets"]] == ["one", "two"]
    assert len(doc["runs"]) == 2 * 2 * 2
    assert [workload["name"] for workload in doc["workloads"]] == ["C1", "C2"]
    (c1, _) = doc["ratios"]
    assert (c1["target"], c1["baseline"], c1["workload"]) == ("two", "one", "C1")
    one, two = ([r for r in doc["runs"] if (r["target"], r["workload"]) == (t, "C1")] for t in ("one", "two"))
    ratios = sorted(
        new["latency_ms_p50"] / old["latency_ms_p50"]
        for new, old in zip(sorted(two, key=repeat_of), sorted(one, key=repeat_of), strict=True)
    )
    assert c1["latency_ms_p50"] == pytest.approx([sum(ratios) / 2, ratios[0], ratios[1]])


def repeat_of(run: dict[str, Any]) -> Any:
    return run["repeat"]


def test_an_earlier_run_can_be_compared(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.json"
    assert bench("--url", f"old={server.url}", *CUSTOM, "--json", str(earlier)) == 0
    started = json.loads(earlier.read_text())["started"]
    capsys.readouterr()
    assert bench("--url", f"new={server.url}", *CUSTOM, "--compare", str(earlier)) == 0
    figures, ratios = capsys.readouterr().out.split(f"ratios to the run of {started}")
    assert figures.count(" new ") == ratios.count(" new ") == 2


def test_an_earlier_run_of_other_workloads_is_reported(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.json"
    assert bench("--url", server.url, *CUSTOM, "--json", str(earlier)) == 0
    assert bench("--url", server.url, *CUSTOM, "--concurrency", "3", "--compare", str(earlier)) == 0
    assert "the earlier run has none of these workloads" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        *(None, "{", "[]", '{"schema": "another"}', "[" * 100_000, '{"schema": "shortfin-llm-bench/1"}'),
        '{"schema": "shortfin-llm-bench/1", "medians": [1], "targets": [{"label": "x"}], "started": ""}',
    ],
)
def test_an_unreadable_earlier_run_is_refused_at_once(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "earlier.json"
    if content is not None:
        file.write_text(content)
    assert bench("--url", server.url, *CUSTOM, "--compare", str(file)) == 2
    assert str(file) in capsys.readouterr().err
    assert server.seen == []


def test_failed_requests_are_shown_and_give_status_1(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("/v1/completions", says({"error": {"message": "prompt too long"}}, 400))
    assert bench("--url", f"it={server.url}", *CUSTOM, "--concurrency", "1") == 1
    assert "C1 on it: 2 requests failed: prompt too long" in capsys.readouterr().out


def test_short_answers_are_reported(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("/v1/completions", completes(["x"]))
    assert bench("--url", f"it={server.url}", *CUSTOM, "--concurrency", "1") == 0
    assert "C1 on it: 2 answers were shorter than requested" in capsys.readouterr().out


def test_presets_and_custom_runs_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--preset", "W1", "--output-tokens", "3") == 2
    assert "--output-tokens changes a preset" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x", "1,,2", ""])
def test_numbers_must_be_positive(value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("--concurrency", value)


def test_an_unwritable_file_is_reported(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--url", server.url, *CUSTOM, "--json", str(tmp_path / "no" / "x.json")) == 2
    assert "cannot write" in capsys.readouterr().err
