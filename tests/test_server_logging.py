from __future__ import annotations

import contextvars
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.api.access_log import current_request_id
from shortfin_apps.llm.server_logging import formatter, set_up
from tests.api.loopback import loopback

FORMS: tuple[Literal["text"], Literal["json"]] = ("text", "json")


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("here")
    return logger.makeRecord("here", logging.INFO, "f.py", 1, message, args, None, extra=extra)


@contextmanager
def log_set_up(level: str) -> Iterator[io.StringIO]:
    """A log in JSON, set up as in a process that has none; what it holds."""
    root = logging.getLogger()
    handlers, level_before = root.handlers[:], root.level
    root.handlers[:] = []
    stream = io.StringIO()
    set_up(level, "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level_before)


def test_text_carries_the_extra_fields() -> None:
    line = formatter("text").format(record("request", status=200, total_s=0.25, route="a b", tenant=None))
    assert line.endswith(' INFO here: request status=200 total_s=0.25 route="a b" tenant=-')


def test_json_carries_the_extra_fields() -> None:
    line = json.loads(formatter("json").format(record("%s!", "hi", status=200, tenant=None)))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "INFO", "logger": "here", "message": "hi!", "status": 200, "tenant": None}


@pytest.mark.parametrize("form", FORMS)
def test_uvicorns_own_colours_are_left_out(form: Literal["text", "json"]) -> None:
    assert "31m" not in formatter(form).format(record("started", color_message="\x1b[31mstarted"))


@given(message=st.text(), value=st.text())
def test_a_record_is_one_printable_line(message: str, value: str) -> None:
    for form in FORMS:
        line = formatter(form).format(record("%s", message, value=value))
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    assert json.loads(line)["value"] == value
    assert json.loads(line)["message"] == message


def test_a_traceback_starts_no_line_of_its_own() -> None:
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


def test_what_is_logged_during_a_request_has_its_id() -> None:
    with log_set_up("info") as stream:
        contextvars.copy_context().run(log_as, "r1")
        logging.getLogger("x").warning("outside")
        logging.getLogger("x").debug("never")
    inside, outside = (json.loads(line) for line in stream.getvalue().splitlines())
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def log_as(request_id: str) -> None:
    current_request_id.set(request_id)
    logging.getLogger("x").warning("inside")


async def test_a_served_request_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    with log_set_up("info") as stream:
        async with loopback(log_format="json") as server:
            await server.until_ready()
            headers = {"X-Request-Id": "r2"}
            await server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    [line] = [line for line in told if line["message"] == "request"]
    assert (line["request_id"], line["route"], line["status"]) == ("r2", "/v1/completions", 200)
    assert any(line["message"].startswith("serving ") for line in told)
    assert "Serving" not in capsys.readouterr().out, "in JSON the log says it"


def test_a_process_speaks_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shortfin_apps.llm.server", "no-such-directory", "--log-format", "json"]
    done = subprocess.run(
        [*command, "--program_isolation", "per_call"],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *told, error = done.stderr.splitlines()
    assert error.startswith("error: no-such-directory")
    assert ["program_isolation" in json.loads(line)["message"] for line in told] == [True]
