"""Requests that broke upstream's server, one by one, against a server process.

Each of them killed upstream's process, blocked all later requests, or got an answer as if it were correct.
Here each must be answered correctly, and the server must keep serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop

pytestmark = pytest.mark.slow

HEALTHY = {"text": "hello", "sampling_params": {"max_completion_tokens": 4}}
CONTEXT_EXCEEDED = 100_000


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    running = start(tiny_artifact)
    yield running
    assert stop(running) == 0, "and after all of this it stops when it is told to"


@pytest.fixture(scope="module")
def healthy_answer(service: Service) -> Any:
    return httpx.post(f"{service.url}/generate", json=HEALTHY, timeout=PATIENCE_S).json()


def with_params(**params: Any) -> dict[str, Any]:
    return {"text": "hello", "sampling_params": params}


# The request, the field named by the answer, and its effect on upstream's server.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "id above the vocabulary: segfault": ({"input_ids": [99_999]}, "input_ids"),
    "negative id: garbage": ({"input_ids": [-3]}, "input_ids"),
    "id beyond 64 bits": ({"input_ids": [2**70]}, "input_ids"),
    "bad id in a batch": ({"input_ids": [[1], [99_999]]}, "input_ids"),
    "no text: hangs all others": ({"text": ""}, "text"),
    "no text in a batch": ({"text": ["hello", ""]}, "text"),
    "too few sampling_params: hangs all others": (
        {"text": ["a", "b", "c"], "sampling_params": [{}, {}]},
        "sampling_params",
    ),
    "no ids: 500": ({"input_ids": []}, "input_ids"),
    "no ids in a batch": ({"input_ids": [[1], []]}, "input_ids"),
    "no prompts": ({"text": []}, "text"),
    "both prompts: 500": ({"text": "hello", "input_ids": [1]}, "text"),
    "neither prompt: 500": ({}, "text"),
    "one rid for a batch: 500": ({"text": ["a", "b"], "rid": "x"}, "rid"),
    "the same rid twice": ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    "prompt beyond the context: wrong tokens": ({"input_ids": [1] * CONTEXT_EXCEEDED}, "input_ids"),
    "text beyond the context": ({"text": "a" * CONTEXT_EXCEEDED}, "text"),
    "output beyond the context: wrong tokens": (
        with_params(max_completion_tokens=CONTEXT_EXCEEDED),
        "sampling_params.max_completion_tokens",
    ),
    "no beams: an empty answer": (with_params(num_beams=0), "sampling_params.num_beams"),
    "more beams than candidates": (with_params(num_beams=1000), "sampling_params.num_beams"),
    "negative tokens": (with_params(max_completion_tokens=-1), "sampling_params.max_completion_tokens"),
    "more choices than the queue": ({"text": ["a"] * 9, "sampling_params": {"n": 128}}, "sampling_params.n"),
    "too many choices": (with_params(n=10**9), "sampling_params.n"),
    "a text for a number": (with_params(temperature="hot"), "sampling_params.temperature"),
    "a number for a text": ({"text": 5}, "text"),
    "mixed ids": ({"input_ids": [1, [2]]}, "input_ids"),
    "a fraction of an id": ({"input_ids": [1.5]}, "input_ids"),
    "a bias of no token": (with_params(logit_bias={"x": 100}), "sampling_params.logit_bias"),
}


@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_each_is_refused_and_the_server_keeps_serving(
    body: dict[str, Any], param: str, service: Service, healthy_answer: Any
) -> None:
    refused = httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S)
    assert refused.status_code == 400, refused.text
    assert f"`{param}`" in refused.json()["error"]
    assert httpx.get(f"{service.url}/health").status_code == 200
    after = httpx.post(f"{service.url}/generate", json=HEALTHY, timeout=PATIENCE_S)
    assert after.json()["responses"][0]["responses"][0]["text"] == answer_text(healthy_answer)


def answer_text(answer: Any) -> str:
    text: str = answer["responses"][0]["responses"][0]["text"]
    return text


def test_several_choices_of_one_text(service: Service, healthy_answer: Any) -> None:
    """This ended upstream's main loop, so that every later request failed."""
    body = with_params(n=2, max_completion_tokens=4)
    [answer] = httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S).json()["responses"]
    assert [each["text"] for each in answer["responses"]] == [answer_text(healthy_answer)] * 2


def test_return_input_ids(service: Service) -> None:
    """Upstream's request never ended, as its answer could not be serialised."""
    body = {**HEALTHY, "return_input_ids": True}
    [answer] = httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S).json()["responses"]
    assert answer["input_ids"]
    assert all(isinstance(token, int) for token in answer["input_ids"])


OPENAI: dict[str, tuple[str, dict[str, Any], str]] = {
    "bad id": ("completions", {"prompt": [99_999]}, "prompt"),
    "negative id": ("completions", {"prompt": [-1]}, "prompt"),
    "empty": ("completions", {"prompt": ""}, "prompt"),
    "empty batch": ("completions", {"prompt": []}, "prompt"),
    "long": ("completions", {"prompt": "a" * CONTEXT_EXCEEDED}, "prompt"),
    "greedy for tokens": ("completions", {"prompt": "a", "max_tokens": CONTEXT_EXCEEDED}, "max_tokens"),
    "no messages": ("chat/completions", {"messages": []}, "messages"),
    "no role": ("chat/completions", {"messages": [{"content": "a"}]}, "messages.role"),
    "long conversation": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a" * CONTEXT_EXCEEDED}]},
        "messages",
    ),
    "stop token": ("completions", {"prompt": "a", "stop_token_ids": [99_999]}, "stop_token_ids"),
    "seed": ("completions", {"prompt": "a", "seed": -2}, "seed"),
    "tools": ("chat/completions", {"messages": [], "tools": [{}]}, "messages"),
}


@pytest.mark.parametrize(("route", "body", "param"), OPENAI.values(), ids=OPENAI.keys())
def test_openai_routes_answer_with_openai_errors(
    route: str, body: dict[str, Any], param: str, service: Service
) -> None:
    refused = httpx.post(f"{service.url}/v1/{route}", json=body, timeout=PATIENCE_S)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_no_request_or_page_is_left(service: Service) -> None:
    for body, _ in REFUSED.values():
        httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S)
    assert service.metric("vllm:num_requests_running") == 0
    assert service.metric("vllm:num_requests_waiting") == 0
    assert service.metric("shortfin_llm:pages_leased") == 0
