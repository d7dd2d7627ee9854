"""The command: options, files and exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.tools.qualify import run
from shortfin_apps.llm.tools.qualify.outcome import Outcome, Status
from tests.integration import damages


def qualify(*arguments: object) -> int:
    return main(["qualify", *map(str, arguments)])


def test_a_report_is_written(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_artifact.vmfb.parent
    assert qualify(directory, "--only", "files,self-test,queued", "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        str(tmp_path / "out" / name) for name in ("qualify.json", "qualify.html")
    ]
    assert "self-test      pass" in shown.err
    doc = json.loads((tmp_path / "out" / "qualify.json").read_text())
    assert [check["name"] for check in doc["checks"]] == ["machine", "files", "self-test", "queued"]
    assert doc["passed"]
    assert doc["device"] == "cpu"


def test_a_failure_is_the_exit_status_and_named(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "tiny"))
    damages.flip_weight(14)(copy)
    assert qualify(copy, "--only", "self-test", "--out", tmp_path) == 1
    assert "failed: 1 of 2 checks: damaged file" in capsys.readouterr().err
    assert json.loads((tmp_path / "qualify.json").read_text())["faults"] == ["damaged file"]


def test_wrong_options_are_refused_by_name(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qualify("--only", "speed", "--out", tmp_path) == 2
    assert "no check is named 'speed'; there are machine, device" in capsys.readouterr().err
    assert qualify(tiny_artifact.vmfb.parent, "--device", "hip:gfx942", "--out", tmp_path) == 2
    assert "was built for cpu; leave out `--device hip:gfx942`" in capsys.readouterr().err
    assert qualify(tiny_artifact.vmfb.parent, "--only", "soak", "--out", tmp_path) == 2
    assert "needs `--soak`" in capsys.readouterr().err


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that must not run."""

    def fails(*_: object) -> None:
        pytest.fail("checks run")

    monkeypatch.setattr(run, "run_checks", fails)


@pytest.mark.parametrize("minutes", ["-1", "inf", "nan", "1e400"])
def test_a_soak_without_an_end_is_refused(
    minutes: str, no_checks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qualify("--device", "cpu", "--soak", minutes, "--out", tmp_path / "out") == 2
    assert "`--soak` is a number of minutes" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_checks(
    no_checks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert qualify("--device", "cpu", "--out", tmp_path / "file") == 2
    assert "cannot write to" in capsys.readouterr().err
    (tmp_path / "qualify.html").mkdir()
    assert qualify("--device", "cpu", "--out", tmp_path) == 2
    assert "qualify.html: it is a folder" in capsys.readouterr().err


def test_a_report_that_can_no_longer_be_written_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fills_the_place(checks: object, plan: object, note: Callable[[Outcome], None]) -> None:
        (tmp_path / "out").rmdir()
        (tmp_path / "out").touch()
        note(Outcome("files", Status.PASSED, "", 0.0))

    monkeypatch.setattr(run, "run_checks", fills_the_place)
    assert qualify("--device", "cpu", "--only", "files", "--out", tmp_path / "out") == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["checks"][0]["name"] == "files"
    assert "cannot write to" in shown.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "foo"], "unknown device 'foo'"),
        (["--device", "hip:foo"], "unknown AMD chip 'foo'"),
        (["--device", "hip:gfx942,cpu"], "names 2 devices"),
        (["missing/model"], "missing/model: no such directory"),
        (["missing.gguf"], "missing.gguf: no such file"),
        (["empty"], "empty: "),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    arguments: list[str],
    text: str,
    no_checks: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    assert qualify(*arguments) == 2
    assert text in capsys.readouterr().err


def test_an_interrupted_run_writes_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(checks: object, plan: object, note: Callable[[Outcome], None]) -> None:
        note(Outcome("machine", Status.PASSED, "", 0.1))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_checks", interrupted)
    assert qualify("--device", "cpu", "--only", "files,weights", "--out", tmp_path) == 130
    doc = json.loads((tmp_path / "qualify.json").read_text())
    assert (doc["interrupted"], doc["passed"]) == (True, False)
    assert [each["status"] for each in doc["checks"]] == ["pass", "skipped", "skipped"]
    assert "interrupted: 1 passed, 2 skipped" in capsys.readouterr().err
    assert "interrupted: 1 passed, 2 skipped" in (tmp_path / "qualify.html").read_text()
