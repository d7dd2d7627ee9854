from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, TokenLogprobs
from shortfin_apps.llm.serving.api.generation import Choices
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, NATIVE, TOKENIZER, Harness


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


SCORES = {0: (-3.0, -1.0), 1: (-0.5,), 2: (-1.0, -1.0, -1.0), 3: (-9.0,)}  # of the tokens, by seed


def letters(call: GenerateCall) -> Iterator[Delta]:
    """Answers `a` to the first seed, `b` to the second, and so on: a letter for each of its SCORES."""
    seed = call.params.seed or 0
    [token_id] = TOKENIZER.encode("abcd"[seed])
    scores = SCORES[seed]
    for position, score in enumerate(scores):
        yield Delta(
            request_id=call.request_id,
            token_ids=(token_id,),
            logprobs=() if call.params.logprobs is None else (TokenLogprobs(score, (), 1),),
            finish_reason=FinishReason.LENGTH if position + 1 == len(scores) else None,
        )


@pytest.fixture
def harness() -> Harness:
    return Harness(letters)


async def test_the_best_completions_are_returned_and_all_are_counted(harness: Harness) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "best_of": 4, "seed": 0}
    answer = (await harness.post(COMPLETIONS, body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(["b", "ccc"] * 2))
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * sum(map(len, SCORES.values()))
    assert answer["usage"]["prompt_tokens"] == 2


async def test_logprobs_and_echoes_are_those_of_what_is_returned(harness: Harness) -> None:
    body = {"prompt": ["x", "y"], "best_of": 4, "seed": 0, "echo": True, "logprobs": 0}
    answer = (await harness.post(COMPLETIONS, body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["xb", "yb"]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[None, -0.5]] * 2


async def test_the_best_answers_of_generate(harness: Harness) -> None:
    sampling: list[dict[str, Any]] = [{"best_of": 4, "n": 3, "seed": 0}, {"seed": 3}]
    response = await harness.post(NATIVE, {"text": ["x", "y"], "sampling_params": sampling})
    ranked, single = [each["responses"] for each in response.json()["responses"]]
    assert [answer["text"] for answer in ranked] == ["b", "ccc", "aa"]
    assert [answer["meta_info"]["completion_tokens"] for answer in ranked] == [1, 3, 2]
    assert "output_token_logprobs" not in ranked[0]["meta_info"]
    assert [answer["text"] for answer in single] == ["d"]


async def test_without_ranking_nothing_more_is_computed(harness: Harness) -> None:
    await harness.post(COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 2, "seed": 0})
    await harness.post(COMPLETIONS, {"prompt": "x", "best_of": 1, "stream": True})
    assert [call.params.logprobs for call in harness.engine.calls] == [None] * 3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": ["x"] * 5, "best_of": 2}, "best_of"),
    (CHAT, {"messages": MESSAGES, "best_of": 2}, "best_of"),
    (NATIVE, {"text": "x", "sampling_params": {"best_of": 2}, "stream": True}, "sampling_params.best_of"),
    (NATIVE, {"text": "x", "sampling_params": {"best_of": 0}}, "sampling_params.best_of"),
    (NATIVE, {"text": "x", "sampling_params": {"best_of": 2, "num_beams": 2}}, "sampling_params.best_of"),
    (NATIVE, {"text": "x", "best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=str)
async def test_what_cannot_be_kept_is_refused_by_name(
    harness: Harness, path: str, body: dict[str, Any], field: str
) -> None:
    response = await harness.post(path, body)
    assert response.status_code == 400, response.text
    assert f"`{field}`" in response.text
    assert not harness.engine.calls


async def test_a_client_that_leaves_aborts_all_candidates(harness: Harness) -> None:
    harness.engine.gate.clear()
    post = asyncio.create_task(harness.post(COMPLETIONS, {"prompt": "x", "best_of": 3, "seed": 0}))
    await harness.engine.waiting.wait()
    post.cancel()
    with pytest.raises(asyncio.CancelledError):
        await post
    while harness.engine.live:
        await harness.engine.freed.wait()
    assert len(harness.engine.aborted) == 3


def answer_of(scores: Sequence[float]) -> TextDelta:
    return TextDelta("", tuple(range(len(scores))), tuple(TokenLogprobs(score, (), 1) for score in scores))


SCORE_LISTS = st.lists(st.lists(st.floats(-10, 0), min_size=1, max_size=4), min_size=1, max_size=6)


@given(groups=st.lists(SCORE_LISTS, min_size=1, max_size=3), data=st.data())
def test_no_answer_that_is_left_out_is_better(groups: list[list[list[float]]], data: st.DataObject) -> None:
    generated = min(map(len, groups))
    returned = data.draw(st.integers(1, generated))
    answers = [[answer_of(scores) for scores in group[:generated]] for group in groups]
    picked = Choices(returned, generated, logprobs=0).pick([each for group in answers for each in group])

    def mean(answer: TextDelta) -> float:
        return sum(each.logprob for each in answer.logprobs) / len(answer.logprobs)

    for index, group in enumerate(answers):
        chosen = picked[index * returned : (index + 1) * returned]
        assert all(each in group for each in chosen)
        if returned < generated:
            expected = sorted(map(mean, group), reverse=True)[:returned]
            assert list(map(mean, chosen)) == pytest.approx(expected)
