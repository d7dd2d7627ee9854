from __future__ import annotations

import json

import pytest

from shortfin_apps.llm.offline.batch.results import Finished, read_result, result_of
from tests.offline.batch.batches import answered, completion, result


def test_a_result_has_openais_form() -> None:
    made = result_of("a", answered())
    parsed = json.loads(made.line)
    assert parsed.pop("id").startswith("batch_req_")
    body = json.loads(completion())
    response = {"status_code": 200, "request_id": "request", "body": body}
    assert parsed == {"custom_id": "a", "response": response, "error": None}
    assert (made.prompt_tokens, made.cached_tokens, made.completion_tokens) == (3, 1, 2)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_result_is_read_as_it_was_written(status: int) -> None:
    assert read_result(result("é\n", status).line) == Finished("é\n", status == 200)


@pytest.mark.parametrize(
    "body", [b"<html>\nno", b"[]", b'{"usage": []}', b'{"usage": {"prompt_tokens": "?"}}']
)
def test_the_answer_of_another_program_is_one_line_too(body: bytes) -> None:
    made = result_of("a", answered(500, body))
    assert made.line.count(b"\n") == 1
    assert made.prompt_tokens == 0
    assert read_result(made.line) == Finished("a", False)


def test_a_result_has_no_line_end_of_unicode() -> None:
    made = result_of("a\x85", answered(200, "\u2028\u2029".encode()))
    assert len(made.line.decode().splitlines()) == 1
    assert json.loads(made.line)["response"]["body"] == "\u2028\u2029"


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b"\0\0\n", b'{"custom_id": "a"}', b"\xff", b"[" * 99_999]
)
def test_what_is_no_result_is_none(line: bytes) -> None:
    assert read_result(line) is None
