from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.client.answers import ChatOptions, Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.offline.bodies import chat_body, check_names, completion_body, is_one_prompt, streamed


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
