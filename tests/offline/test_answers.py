from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.client.answers import ChatOptions, Sampling, Usage
from shortfin_apps.llm.client.errors import ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.offline.answers import (
    TokenLogprob,
    chat_body,
    check_names,
    completion_body,
    failed,
    is_one_prompt,
    parse_answer,
    streamed,
)


@pytest.mark.parametrize("prompt", ["", "text", [1, 2], (1,), [np.int64(1)]])
def test_a_text_or_token_ids_are_one_prompt(prompt: object) -> None:
    assert is_one_prompt(prompt)


@pytest.mark.parametrize("prompts", [[], ["a"], ("a", "b"), [[1], [2]], ["a", [1]]])
def test_a_list_of_those_are_several(prompts: object) -> None:
    assert not is_one_prompt(prompts)


@pytest.mark.parametrize("prompts", [None, 1, iter("a"), {"a"}])
def test_anything_else_is_refused(prompts: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompts must be a text, token ids or a list of them"):
        is_one_prompt(prompts)


def test_bodies_have_what_was_given() -> None:
    int_of_numpy: Any = np.int64(1)
    body = completion_body([int_of_numpy, 2], 3, {"logit_bias": {5: 1.0}, "seed": None})
    assert json.loads(body) == {
        "prompt": [1, 2],
        "logprobs": 3,
        "logit_bias": {"5": 1.0},
        "return_token_ids": True,
    }
    messages = [{"role": "user", "content": "hi"}]
    fixed = {"messages": messages, "return_token_ids": True}
    assert json.loads(chat_body(messages, None, {})) == fixed
    assert json.loads(chat_body(messages, 2, {})) == fixed | {"logprobs": True, "top_logprobs": 2}
    assert json.loads(streamed(chat_body(messages, None, {}))) == fixed | {
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_json_cannot_express_is_refused() -> None:
    prompt: Any = [object()]
    with pytest.raises(InvalidRequestError, match="the request has what JSON cannot express"):
        completion_body(prompt, None, {})


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_numbers_that_json_would_drop_are_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match="`temperature` must be a finite number"):
        completion_body("a", None, {"temperature": temperature})


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]]])
def test_several_prompts_in_place_of_one_are_refused(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="`prompt` must be one text or the token ids of one"):
        completion_body(prompts, None, {})


def test_lone_surrogates_are_replaced() -> None:
    assert json.loads(completion_body("a\ud83d", None, {}))["prompt"] == "a\ufffd"
    messages = [{"role": "user", "content": "\ude00b"}]
    assert json.loads(chat_body(messages, None, {}))["messages"][0]["content"] == "\ufffdb"


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    check_names({"temperature": 1, "stop": "x"}, Sampling)
    check_names({"temperature": 1, "tools": []}, ChatOptions)
    for name in ("n", "tools", "return_token_ids", "heat"):
        with pytest.raises(InvalidRequestError, match=f"there is no parameter `{name}`; there are "):
            check_names({name: 1}, Sampling)


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
