from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shortfin_apps.llm import cli
from shortfin_apps.llm.serving.server import command
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.keys import key_ring

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("entry", [command.main, lambda argv: cli.main(["serve", *argv])])
def test_a_missing_artefact_is_one_sentence_and_exit_2(
    entry: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["no-such-directory"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no-such-directory: no such directory")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("entry", [command.main, lambda argv: cli.main(["serve", *argv])])
def test_a_path_that_cannot_be_looked_at_is_one_sentence_and_exit_2(
    entry: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a directory that this user may not search, which root may."""
    flags = ("--vmfb", "--tokenizer-json", "--model-config", "--parameters")
    assert entry([word for flag in flags for word in (flag, "a" * 300)]) == 2
    err = capsys.readouterr().err
    assert (
        err
        == f"error: {'a' * 300}: cannot be used (File name too long); check its path and who may read it\n"
    )


def test_help_that_cannot_be_written_is_one_sentence_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert command.main(["--help"]) == 2
    assert capsys.readouterr().err.startswith("error: the output cannot be written (No space left")


def test_ctrl_c_before_the_server_runs_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fitted", interrupted)
    assert command.main(["model"]) == cli.EXIT_INTERRUPTED


@pytest.mark.parametrize("level", ["info", "warning"])
def test_ignored_settings_are_logged(level: str, tmp_path: Path) -> None:
    """In its own process, which sets up its own logging."""
    (tmp_path / "server.json").write_text('{"decode_config": {"num_beams": 4}}')
    command = [sys.executable, "-m", "shortfin_apps.llm.server", "no-such-directory", "--log-level", level]
    ignored = ["--program_isolation", "per_call", "--device_ids", "0", "--server_config", "server.json"]
    environment = {**os.environ, "SHORTFIN_LLM_PORT": "tcp://10.0.0.1:80", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*command, *ignored],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if " WARNING " in line]
    for word in ("`program_isolation`", "`decode_config.num_beams`", "`--device-ids`", "`SHORTFIN_LLM_PORT`"):
        assert sum(word in line for line in lines) == 1, done.stderr


@pytest.mark.parametrize("value", ["", ",", "k,"])
def test_an_empty_api_key_does_not_start_an_open_server(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", value)
    assert command.main(["no-such-directory"]) == 2
    assert capsys.readouterr().err.startswith("error: `SHORTFIN_LLM_API_KEY`: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", "@no-such-file"], "no-such-file: cannot be read as a file of keys"),
        (["--ssl-certfile", "no-such-file"], "`--ssl-certfile`: no-such-file: no such file"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", "no-such-file"], "`--ssl-keyfile`: no-such-file"),
        (["--receipt-key", "no-such-file"], "`--receipt-key`: no-such-file: no such file"),
        (["--ssl-certfile", __file__], "--ssl-certfile, --ssl-keyfile: not a certificate and its key"),
        (["--receipt-key", __file__], f"{__file__}: holds no private Ed25519 key"),
    ],
)
def test_a_file_that_lacks_its_secret_is_refused_before_the_model_is_built(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "built", lambda config: pytest.fail("it was built"))
    assert command.main(["random:tiny", "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--ssl-certfile", "--receipt-key"])
def test_a_secret_in_a_pipe_is_left_for_the_server(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pipe is empty when it is read again."""

    def interrupted(config: ServerConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "built", interrupted)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    arguments = ["model", flag, str(tmp_path / "pipe")]
    assert command.main(arguments) == cli.EXIT_INTERRUPTED


def test_a_file_of_keys_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's `<(...)` is a pipe, which is empty when it is read again; a file may change meanwhile."""

    def interrupted(config: ServerConfig) -> None:
        keys = key_ring(config)
        assert [keys.caller(key) is not None for key in ("one", "two,", "three")] == [True, True, False]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "built", interrupted)
    ours, theirs = os.pipe()
    os.write(theirs, b"one\ntwo,\n")
    os.close(theirs)
    with os.fdopen(ours):
        assert command.main(["model", "--api-key", f"@/dev/fd/{ours}"]) == cli.EXIT_INTERRUPTED


def test_a_port_in_use_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "built", lambda config: pytest.fail("it was built"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main(["random:tiny", "--port", str(port)]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err
