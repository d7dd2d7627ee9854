from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shlex
import sys

import pytest

from shortfin_apps.llm.tools.cluster import command
from shortfin_apps.llm.tools.cluster.router_flags import ClusterOptions
from shortfin_apps.llm.tools.cluster.supervisor import ClusterError
from tests.serving.server.log_stream import PIPE_BYTES, log_set_up, unread_pipe
from tests.serving.server.settings import parse


def test_the_banners_example_is_one_command_whatever_the_model_is_called() -> None:
    name = "it's \"a\" model'; touch /tmp/x; '"
    banner = command._banner(ClusterOptions(), "http://127.0.0.1:1", name)
    example = banner.partition("Try:\n")[2].replace("\\\n", " ").splitlines()[0]
    words = shlex.split(example)
    assert json.loads(words[-1])["model"] == name
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/completions"]


def test_lines_of_processes_control_no_terminal() -> None:
    with log_set_up(io.StringIO()) as stream:
        command._show("router", "\x1b[2J")
        command._show_unchanged("router", "\x1b[2J")
    assert stream.getvalue() == "router | ␛[2J\n␛[2J\n"


@pytest.mark.timeout(20)
def test_a_log_that_nobody_reads_does_not_block_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread_pipe() as (reader, writer), log_set_up(writer):
        monkeypatch.setattr(sys, "stderr", writer)
        for _ in range(3):
            command._show("router", "x" * PIPE_BYTES)
        reader.close()


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_that_there_is_not_is_a_wrong_flag(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["m", "--metrics-port", port])
    assert "--metrics-port" in capsys.readouterr().err.splitlines()[-1]
    assert parser.parse_args(["m", "--metrics-port", "65535"]).metrics_port == 65535


async def test_too_few_descriptors_for_the_workers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def held_port(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(command, "HeldPort", held_port)
    with pytest.raises(ClusterError, match=r"Too many open files\); choose fewer `--workers`"):
        await command._serve(parse("m", "--port", "0"), ClusterOptions(metrics_port=0), "m")
