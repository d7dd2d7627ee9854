from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.http.request_id import current_request_id
from shortfin_apps.llm.serving.server.logs import MAX_LINES, formatter
from tests.serving.api.loopback import loopback, ready_server
from tests.serving.server.log_stream import PIPE_BYTES, log_set_up, unread_pipe

PATIENCE_S = 60.0  # generous: it takes milliseconds
LINE_BYTES = 200  # minimum length of a log line

FORMS: tuple[Literal["text"], Literal["json"]] = ("text", "json")


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("here")
    return logger.makeRecord("here", logging.INFO, "f.py", 1, message, args, None, extra=extra)


def test_text_has_the_extra_fields() -> None:
    line = formatter("text").format(record("request", status=200, total_s=0.25, route="a b", tenant=None))
    assert line.endswith(' INFO here: request status=200 total_s=0.25 route="a b" tenant=-')


def test_json_has_the_extra_fields() -> None:
    line = json.loads(formatter("json").format(record("%s!", "hi", status=200, tenant=None)))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "INFO", "logger": "here", "message": "hi!", "status": 200, "tenant": None}


@pytest.mark.parametrize("form", FORMS)
def test_uvicorns_colour_message_is_left_out(form: Literal["text", "json"]) -> None:
    assert "31m" not in formatter(form).format(record("started", color_message="\x1b[31mstarted"))


@given(message=st.text(), value=st.text())
def test_a_record_is_one_printable_line(message: str, value: str) -> None:
    for form in FORMS:
        line = formatter(form).format(record("%s", message, value=value))
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    assert json.loads(line)["value"] == value
    assert json.loads(line)["message"] == message


def test_traceback_lines_are_indented_and_escaped() -> None:
    try:
        raise ValueError("a\n2026-01-01 00:00:00,000 INFO forged: line\x1b[2J")
    except ValueError:
        caught = sys.exc_info()
    made = logging.getLogger("here").makeRecord("here", logging.ERROR, "f", 1, "failed", (), caught)
    first, *rest = formatter("text").format(made).splitlines()
    assert first.endswith("ERROR here: failed")
    assert rest
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert "forged" in json.loads(formatter("json").format(made))["exc_info"]


def test_lines_logged_during_a_request_have_its_id() -> None:
    with log_set_up(io.StringIO()) as stream:
        contextvars.copy_context().run(log_as, "r1")
        logging.getLogger("x").warning("outside")
        logging.getLogger("x").debug("never")
    inside, outside = (json.loads(line) for line in stream.getvalue().splitlines())
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def log_as(request_id: str) -> None:
    current_request_id.set(request_id)
    logging.getLogger("x").warning("inside")


async def test_a_request_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    with log_set_up(io.StringIO()) as stream:
        async with ready_server(log_format="json") as server:
            headers = {"X-Request-Id": "r2"}
            await server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    logged = [json.loads(line) for line in stream.getvalue().splitlines()]
    [line] = [line for line in logged if line["message"] == "request"]
    assert (line["request_id"], line["route"], line["status"]) == ("r2", "/v1/completions", 200)
    assert any(line["message"].startswith("serving ") for line in logged)
    assert "Serving" not in capsys.readouterr().out, "with JSON logs, the banner is a log line"


@pytest.fixture
def unread() -> Iterator[tuple[TextIO, TextIO]]:
    with unread_pipe() as ends:
        yield ends


async def test_a_blocked_log_does_not_block_requests(unread: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread
    with log_set_up(writer):
        async with loopback() as server, asyncio.timeout(PATIENCE_S):
            await server.until_ready()
            for _ in range(2 * PIPE_BYTES // LINE_BYTES):
                assert (await server.client.get("/v1/models")).status_code == 200
        assert json.loads(reader.readline())["level"] == "INFO"


def test_dropped_lines_are_counted(unread: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread
    logged: list[str] = []
    found = threading.Event()

    def read() -> None:
        while "lines were dropped" not in (line := reader.readline()):
            logged.append(json.loads(line)["message"].partition("x")[0])
        logged.append(json.loads(line)["message"])
        found.set()

    with log_set_up(writer):
        for number in range(MAX_LINES + 2 * PIPE_BYTES // LINE_BYTES):
            logging.getLogger("x").info("%d" + "x" * LINE_BYTES, number)
        threading.Thread(target=read, daemon=True).start()
        assert found.wait(PATIENCE_S), logged[-3:]
    *numbers, missing = logged
    assert numbers == [str(number) for number in range(len(numbers))]
    total = MAX_LINES + 2 * PIPE_BYTES // LINE_BYTES
    assert missing == f"the log was not read fast enough: {total - len(numbers)} lines were dropped"


def test_a_closed_stream_is_not_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    with log_set_up(stream):
        logging.getLogger("x").info("for nobody")
    with contextlib.suppress(OSError):
        stream.close()
    assert capfd.readouterr().err == ""


def test_a_process_logs_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shortfin_apps.llm.server", "no-such-directory", "--log-format", "json"]
    done = subprocess.run(
        [*command, "--program_isolation", "per_call"],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *logged, error = done.stderr.splitlines()
    assert error.startswith("error: no-such-directory")
    assert ["program_isolation" in json.loads(line)["message"] for line in logged] == [True]
