from __future__ import annotations

import re

import pytest

from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, Harness


async def test_only_a_completion_of_no_tokens_is_empty(harness: Harness) -> None:
    empty = await harness.post(COMPLETIONS, {"prompt": "a", "max_tokens": 0})
    assert (empty.status_code, harness.engine.calls) == (200, [])
    chat = await harness.post(CHAT, {"messages": MESSAGES, "max_tokens": 0})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "max_tokens")


MODELS_OWN = SamplingDefaults(temperature=0.6, top_k=40, repetition_penalty=1.3, min_p=0.1, max_tokens=9)
ROUTES: dict[str, dict[str, object]] = {
    "/generate": {"text": "hi"},
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


LIMITED: list[dict[str, object]] = [{"n": 0}, {"stop": [""]}, {"bad_words": [""]}, {"logit_bias": {"x": 1}}]


@pytest.mark.parametrize("fields", LIMITED, ids=str)
@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_refuses_what_is_over_a_limit(
    harness: Harness, route: str, fields: dict[str, object]
) -> None:
    nested = {"sampling_params": fields} if route == "/generate" else fields
    response = await harness.post(route, ROUTES[route] | nested)
    assert response.status_code == 400
    assert re.search(rf"{next(iter(fields))}(_sequences)?`", response.text)
    assert harness.engine.calls == []


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_has_the_models_defaults(route: str) -> None:
    harness = Harness(defaults=MODELS_OWN)
    assert (await harness.post(route, ROUTES[route])).status_code == 200
    [params] = [call.params for call in harness.engine.calls]
    assert (params.temperature, params.top_k, params.repetition_penalty, params.min_p) == (0.6, 40, 1.3, 0.1)


@pytest.mark.parametrize(("route", "max_tokens"), [(CHAT, 9), ("/v1/responses", 9), (COMPLETIONS, 16)])
async def test_the_models_longest_answer_is_that_of_chats(route: str, max_tokens: int) -> None:
    harness = Harness(defaults=MODELS_OWN)
    await harness.post(route, ROUTES[route])
    [call] = harness.engine.calls
    assert call.params.max_tokens == max_tokens


async def test_what_a_request_gives_comes_before_the_models_defaults() -> None:
    harness = Harness(defaults=MODELS_OWN)
    given = {"temperature": 0, "top_k": -1, "repetition_penalty": 1, "min_p": 0, "max_tokens": 3}
    await harness.post(CHAT, {"messages": MESSAGES, **given})
    [params] = [call.params for call in harness.engine.calls]
    assert (params.temperature, params.top_k, params.repetition_penalty, params.min_p) == (0, 0, 1, 0)
    assert params.max_tokens == 3
