from __future__ import annotations

import json
from typing import Any

import pytest

from shortfin_apps.llm.client.answers import Usage
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.offline.answers import TokenLogprob, failed, parse_answer


def body(choice: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    return json.dumps(
        {"choices": [{"finish_reason": "stop", "token_ids": [4, 5], **choice}], "usage": usage}
    ).encode()


def test_a_completion_is_read_with_its_logprobs() -> None:
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -2],
        "top_logprobs": [{"a": -1}, {"c": -0.5, "b": -2}],
    }
    answer = parse_answer(body({"text": "ab", "logprobs": logprobs | {"text_offset": [0, 1]}}))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", (4, 5), "stop")
    assert answer.usage == Usage(3, 2, 1)
    assert answer.logprobs == (TokenLogprob("a", -1, {"a": -1}), TokenLogprob("b", -2, {"c": -0.5, "b": -2}))


def test_a_chat_is_read_with_its_logprobs() -> None:
    top = [{"token": "c", "logprob": -0.5, "bytes": [99]}]
    content = [{"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": top}]
    message = {"content": "a", "reasoning_content": "hm"}
    answer = parse_answer(body({"message": message, "logprobs": {"content": content, "refusal": None}}))
    assert (answer.text, answer.reasoning) == ("a", "hm")
    assert answer.logprobs == (TokenLogprob("a", -1, {"c": -0.5}),)


def test_without_logprobs_there_are_none() -> None:
    assert parse_answer(body({"text": "", "logprobs": None})).logprobs is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"no"])
def test_what_is_no_answer_is_an_error(content: bytes) -> None:
    with pytest.raises(ServerError):
        parse_answer(content)


def test_a_failed_answer_has_its_error_alone() -> None:
    error = InvalidRequestError("no")
    answer = failed(error)
    assert (answer.error, answer.text, answer.token_ids, answer.usage) == (error, "", (), Usage(0, 0))
