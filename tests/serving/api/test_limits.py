from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.limits import (
    MAX_CONTAINERS,
    MAX_NAMES,
    JsonCounts,
    Limits,
    counts_of,
    most_counts_of,
)
from tests.serving.api.harness import CHAT, COMPLETIONS, MAX_REQUESTS, NATIVE, Harness

SMALL = Limits(
    body_bytes=500, json_depth=4, prompts=3, prompt_chars=20, n=4, stops=2, stop_chars=5, logprobs=3
)


LONG = "a" * 21
HELLO = [{"role": "user", "content": "a"}]


# route, body, the refused field
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (NATIVE, {"text": LONG}, "text"),
    (NATIVE, {"text": ["a", LONG]}, "text"),
    (NATIVE, {"text": ["a"] * 4}, "text"),
    (NATIVE, {"input_ids": [[1]] * 4}, "input_ids"),
    (NATIVE, {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    (NATIVE, {"text": "a", "sampling_params": {"n": 5}}, "sampling_params.n"),
    (NATIVE, {"text": ["a"] * 3, "sampling_params": {"n": MAX_REQUESTS // 2}}, "sampling_params.n"),
    (NATIVE, {"text": "a", "sampling_params": {"stop": ["a", "b", "c"]}}, "sampling_params.stop"),
    (NATIVE, {"text": "a", "sampling_params": {"stop": "abcdef"}}, "sampling_params.stop"),
    (NATIVE, {"text": "a", "sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop"),
    (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 4}, "top_logprobs_num"),
    (NATIVE, {"text": "a", "rid": ""}, "rid"),
    (NATIVE, {"text": "a", "rid": "a" * 129}, "rid"),
    (NATIVE, {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    (COMPLETIONS, {"prompt": LONG}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 4}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "n": 5}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 3, "n": MAX_REQUESTS // 2}, "n"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a", "b", "c"]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 4}, "logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 11}] * 2}, "messages"),
    (CHAT, {"messages": HELLO, "n": 5}, "n"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/detokenize", {"tokens": [1] * 21}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_fields_above_a_limit_are_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    harness = Harness(limits=SMALL)
    response = await harness.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path == NATIVE:
        assert f"`{param}`" in error
    else:
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert f"`{param}`" in error["message"]
    assert not harness.engine.calls


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"text": ["a" * 20, "b", "c"], "rid": ["x", "y", "z"]}),
        (NATIVE, {"text": "a", "sampling_params": {"n": 4, "stop": ["abcde", "b"]}}),
        (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 3}),
        (COMPLETIONS, {"prompt": ["a" * 20] * 3, "logprobs": 3}),
        (CHAT, {"messages": HELLO, "n": 4}),
    ],
)
async def test_fields_at_the_limit_are_accepted(path: str, body: dict[str, Any]) -> None:
    response = await Harness(limits=Limits(prompts=3, prompt_chars=28, n=4, stops=2)).post(path, body)
    assert response.status_code == 200, response.text


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@given(depth=st.integers(0, 60), limit=st.integers(1, 40))
def test_depth_is_the_nesting_of_brackets(depth: int, limit: int) -> None:
    limits = Limits(json_depth=limit)
    if depth <= limit:
        limits.check_json(nested(depth))
    else:
        with pytest.raises(json.JSONDecodeError, match=f"deeper than {limit} levels"):
            limits.check_json(nested(depth))


@pytest.mark.parametrize(
    ("most", "unit", "message"),
    [
        (MAX_CONTAINERS - 1, "[]", "more than 20,000 arrays and objects"),
        (MAX_CONTAINERS - 1, "{}", "more than 20,000 arrays and objects"),
        (MAX_NAMES, '"a":1', "more than 100,000 names"),
    ],
)
def test_too_many_containers_and_names_are_refused(most: int, unit: str, message: str) -> None:
    begin, end = ("{", "}") if ":" in unit else ("[", "]")
    Limits().check_json_text((begin + ",".join([unit] * most) + end).encode())
    Limits().check_json_text(json.dumps([unit] * 4 * most).encode())  # in texts, they are none
    with pytest.raises(json.JSONDecodeError, match=message):
        Limits().check_json_text((begin + ",".join([unit] * (most + 1)) + end).encode())


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS, CHAT, "/tokenize"])
async def test_deep_bodies_are_refused_before_validation(path: str) -> None:
    response = await Harness(limits=SMALL).post(path, {"extra": nested(4)})
    assert response.status_code == 400
    assert "deeper than 4 levels" in response.text


TEXTS = st.text(st.sampled_from('"\\[]{}:,au\n\u2028é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> JsonCounts:
    """The counts of a value, by walking it."""
    if isinstance(value, dict):
        inner = list(map(counted, value.values()))
        return JsonCounts(1 + sum(c for c, _ in inner), len(value) + sum(n for _, n in inner))
    if isinstance(value, list):
        inner = list(map(counted, value))
        return JsonCounts(1 + sum(c for c, _ in inner), sum(n for _, n in inner))
    return JsonCounts(0, 0)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_counts_are_those_of_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert counts_of(text) == counted(value)
    most = most_counts_of(text)
    assert most.containers >= counted(value).containers
    assert most.names >= counted(value).names


@given(VALUES, st.binary(max_size=6))
def test_an_error_in_the_text_hides_nothing_before_it(value: Any, rubbish: bytes) -> None:
    counts = counts_of(json.dumps(value).encode() + b" \x00" + rubbish)
    assert counts.containers >= counted(value).containers
    assert counts.names >= counted(value).names


@pytest.mark.parametrize("text", [b"", b'"', b'"\\', b'[[[["', b'{"a": "b'])
def test_what_is_cut_is_counted_as_far_as_it_goes(text: bytes) -> None:
    assert counts_of(text).containers == text.partition(b'"')[0].count(b"[") + text.count(b"{")
