from __future__ import annotations

import argparse
import errno
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shortfin_apps.llm import __version__
from shortfin_apps.llm.cli import COMMANDS, main
from shortfin_apps.llm.contract.errors import ArtifactError

# Modules that a subcommand must not import if it only talks to a server.
HEAVY = ("iree", "shortfin", "numpy", "fastapi", "gguf", "tokenizers", "shortfin_apps.llm.builder")


class Scripted(ModuleType):
    """A subcommand's module with a `run` given by the test."""

    DESCRIPTION = ""

    def __init__(self, outcome: BaseException | int) -> None:
        super().__init__("scripted")
        self.outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("word")

    def run(self, args: argparse.Namespace) -> int:
        assert args.word == "x"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted(0)
    monkeypatch.setitem(sys.modules, COMMANDS["serve"].module, scripted)
    return scripted


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("status", [0, 3])
def test_a_subcommands_status_is_returned(serve: Scripted, status: int) -> None:
    serve.outcome = status
    assert main(["serve", "x"]) == status


def test_an_error_is_one_sentence_on_stderr(serve: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    serve.outcome = ArtifactError("no model found")
    assert main(["serve", "x"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: no model found\n")


def test_ctrl_c_is_quiet(serve: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    serve.outcome = KeyboardInterrupt()
    assert main(["serve", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for name, entry in COMMANDS.items():  # a long name has a line of its own
        assert re.search(rf"\n    {name}\s+{re.escape(entry.help)}", out), name


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_an_error_and_a_warning_control_no_terminal(
    serve: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.outcome = ArtifactError("\x1b[2Jno model\x9b")
    assert main(["serve", "x"]) == 2
    assert capsys.readouterr().err == "error: ␛[2Jno model\ufffd\n"
    assert logging.lastResort is not None
    record = logging.makeLogRecord({"msg": "%s", "args": ("\x1b[2J",), "levelno": logging.WARNING})
    assert logging.lastResort.format(record) == "␛[2J"


def test_a_file_that_a_command_cannot_look_at_is_one_sentence(
    serve: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.outcome = PermissionError(errno.EACCES, "Permission denied", "secret/x\x1b")
    assert main(["serve", "x"]) == 2
    refusal = "error: secret/x␛: cannot be used (Permission denied); check its path and who may read it\n"
    assert capsys.readouterr().err == refusal


def test_a_fault_that_names_no_file_keeps_its_traceback(serve: Scripted) -> None:
    serve.outcome = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(OSError, match="Too many open files"):
        main(["serve", "x"])


FULL_DISK = "error: the output cannot be written (No space left on device); free space on its disk\n"
SHOWING = [["--version"], ["--help"], ["serve", "--help-all"], *([name, "--help"] for name in COMMANDS)]


@pytest.mark.parametrize("buffering", [1, -1], ids=["lines", "blocks"])
@pytest.mark.parametrize("words", [*SHOWING, []], ids=" ".join)
def test_help_that_cannot_be_written_is_an_error(
    words: list[str], buffering: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 2
    assert capsys.readouterr().err == FULL_DISK


def test_output_to_a_full_disk_ends_with_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shortfin_apps.llm", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, FULL_DISK)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["frobnicate"])
    assert "'frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"), [(["--prot", "0"], " (did you mean --port?)"), (["a", "--zzz"], "")], ids=str
)
def test_an_unknown_option_shows_the_subcommands_usage(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *words])
    usage, refusal = capsys.readouterr().err.splitlines()
    assert usage == "usage: shortfin-llm serve [MODEL] [options]"
    unknown = next(word for word in words if word.startswith("-"))
    assert refusal == f"shortfin-llm serve: error: unrecognized arguments: {unknown}{hint}"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"shortfin-llm {__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: shortfin-llm {name} " in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["chat"], ["generate"], ["bench"], ["top"], ["completion"]])
def test_help_and_clients_import_neither_compiler_nor_runtime(command: list[str]) -> None:
    code = f"""
import sys
from shortfin_apps.llm.cli import main
try:
    main({[*command, "--help"]!r})
except SystemExit:
    pass
print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python("-c", code).stdout.endswith("loaded: []\n")


@pytest.mark.parametrize("module", ["shortfin_apps.llm", "shortfin_apps.llm.cli"])
def test_the_command_runs_as_a_module(module: str) -> None:
    done = python("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"shortfin-llm {__version__}\n")
