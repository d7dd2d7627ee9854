from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.cli import main
from shortfin_apps.llm.offline.batch.command import _summary
from shortfin_apps.llm.offline.batch.run import Tally
from tests.offline.batch.batches import ids_in, line, results_in, write
from tests.scripted_server import ScriptedServer, says

PATH = "/v1/completions"


def lines(tmp_path: Path, count: int = 3) -> str:
    return str(write(tmp_path / "in.jsonl", [line(str(number)) for number in range(count)]))


def test_a_server_answers_and_a_second_run_asks_nothing(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    server.on(PATH, says({"usage": {"prompt_tokens": 3, "completion_tokens": 2}}))
    arguments = ["batch", lines(tmp_path), "-o", str(out), "--url", server.url]
    assert main(arguments) == 0
    assert sorted(ids_in(out)) == ["0", "1", "2"]
    assert capsys.readouterr().out.startswith(
        "3 lines: 3 answered, 0 failed; 9 prompt tokens, 0 of them cached, and 6"
    )
    assert main(arguments) == 0
    assert capsys.readouterr().out == "3 lines (3 before): 3 answered, 0 failed\n"
    assert len(server.seen) == 3


def test_failed_lines_are_told_by_the_status(server: ScriptedServer, tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    server.on(PATH, says({}), says({"error": "no"}, 400))
    arguments = ["batch", lines(tmp_path), "-o", str(out), "--url", server.url, "--errors", str(errors)]
    assert main(arguments) == main(arguments) == 1
    assert (len(ids_in(out)), [each["response"]["status_code"] for each in results_in(errors)]) == (
        1,
        [400, 400],
    )


def test_a_batch_that_is_stopped_says_how_to_go_on(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    server.on(PATH, says({}), says({}, 401))
    arguments = ["batch", lines(tmp_path), "-o", str(out), "--url", server.url, "--concurrency", "1"]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "1 of 3 lines are done; the same command continues with the rest\nerror: the server refuses"
    )
    server.on(PATH, says({}))
    assert main(arguments) == 0
    assert ids_in(out) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "order", [["IN", "MODEL", "-o", "OUT"], ["IN", "-o", "OUT", "MODEL"], ["-o", "OUT", "IN", "MODEL"]]
)
def test_words_may_have_any_order(
    tmp_path: Path, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"IN": lines(tmp_path, 1), "MODEL": str(tmp_path / "none"), "OUT": str(tmp_path / "out.jsonl")}
    assert main(["batch", *(words.get(word, word) for word in order)]) == 2
    assert f"error: {tmp_path / 'none'}: no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--url=http://x", "--api-key=k", "--timeout=1", "--max-retries=1"])
@pytest.mark.parametrize("local", ["MODEL", "--device=hip"])
def test_a_model_here_and_a_server_are_not_mixed(
    tmp_path: Path, local: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", lines(tmp_path), "-o", str(tmp_path / "out.jsonl"), local, option]) == 2
    assert f"`{option.partition('=')[0]}` is for a server" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_lines_are_reported_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [line("a"), line("a"), line("b", "/v1/embeddings")])
    assert main(["batch", str(source), "MODEL", "-o", str(tmp_path / "out.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "has 2 lines that cannot be sent" in told
    assert "line 2: `custom_id` 'a' is that of line 1" in told
    assert "line 3: `url` is '/v1/embeddings'" in told
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_concurrency_is_a_positive_number(tmp_path: Path, number: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["batch", lines(tmp_path), "-o", str(tmp_path / "out"), f"--concurrency={number}"])


@pytest.mark.parametrize("number", ["-1", "x", "1.5"])
def test_retries_are_a_number(tmp_path: Path, number: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["batch", lines(tmp_path), "-o", str(tmp_path / "out"), f"--max-retries={number}"])


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_timeout_in_which_nothing_can_be_sent_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    assert main(["batch", lines(tmp_path), "-o", str(tmp_path / "out"), f"--timeout={seconds}"]) == 2
    assert "the timeout must be more than 0 seconds" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["batch", "--help"])
    told = capsys.readouterr().out
    assert told.startswith("usage: shortfin-llm batch IN [MODEL] -o OUT [options]\n")
    assert '"custom_id": "a1"' in told
    assert "--max-running" in told
    assert "--port" not in told


def test_the_summary_counts_lines_of_all_runs_and_tokens_of_this_one() -> None:
    tally = Tally(2_000, 500, 2_000, 3, 1_000, 100, 5_000, 10.0)
    assert _summary(tally) == (
        "2,000 lines (500 before): 1,997 answered, 3 failed; 1,000 prompt tokens, 100 of them cached,"
        " and 5,000 generated in 10.0 s (500 tok/s)"
    )
