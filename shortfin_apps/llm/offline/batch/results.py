"""The output's lines: OpenAI's batch results, written and read."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import msgspec
import orjson

from shortfin_apps.llm.offline.local_model import OK, Answered
from shortfin_apps.llm.serving.api.streaming import json_line


class Finished(NamedTuple):
    """A line of the input that has a result; `is_ok` is True for status 200."""

    custom_id: str
    is_ok: bool


class Result(NamedTuple):
    """A line of the output, with its token counts."""

    finished: Finished
    line: bytes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response


def result_of(custom_id: str, answered: Answered) -> Result:
    """Create the result of a request answered with any status."""
    body = _parsed(answered.body)
    response = {"status_code": answered.status, "request_id": answered.request_id, "body": body}
    line = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    return Result(
        Finished(custom_id, answered.status == OK),
        json_line(line) + b"\n",
        _count(usage, "prompt_tokens"),
        _count(details if isinstance(details, dict) else {}, "cached_tokens"),
        _count(usage, "completion_tokens"),
    )


def read_result(line: bytes) -> Finished | None:
    """Parse a line of an output; None if it is not a result."""
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Finished(read.custom_id, read.response.status_code == OK)


def _parsed(body: bytes) -> Any:
    """Parse JSON; return anything else, such as a proxy's error page, as text."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def _count(counts: dict[str, Any], name: str) -> int:
    count = counts.get(name)
    return count if isinstance(count, int) else 0
