from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import FinishReason, TokenLogprobs
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.serving.api.openai_answers import ChunkEvents
from shortfin_apps.llm.serving.api.openai_shapes import (
    NO_EXTRAS,
    ChatShape,
    CompletionShape,
    Extras,
    Shape,
    usage,
)
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.serving.http.streaming import event
from tests.serving.api.harness import TOKENIZER

REQUEST = TextRequest(request_id="r", prompt_token_ids=(5, 6), params=SamplingParams(max_tokens=50))
REQUESTS = [REQUEST, replace(REQUEST, choice=1)]
HEAD = {"id": 'cmpl-"\\u0000"', "created": 1, "model": "tiny"}

MakeShape = Callable[[Extras, bool], Shape]


def completions(extras: Extras, has_echo: bool) -> Shape:
    return CompletionShape(TOKENIZER, REQUESTS, ["the", "\0"] if has_echo else None, extras)


def chat(extras: Extras, has_echo: bool) -> Shape:
    return ChatShape(TOKENIZER, REQUEST.prompt_token_ids, extras)


@st.composite
def deltas(draw: st.DrawFn) -> list[tuple[int, TextDelta]]:
    """Of the two requests, each with a text that may be empty, with log-probabilities, or the last."""
    texts = st.text(st.sampled_from('a"\0\u2028€'), max_size=3)
    steps = []
    for index in draw(st.lists(st.integers(0, 1), max_size=12)):
        token_ids = tuple(draw(st.lists(st.integers(40, 50), max_size=2)))
        logprobs = tuple(TokenLogprobs(-0.5, (), 1) for _ in token_ids) if draw(st.booleans()) else ()
        steps.append((index, TextDelta(draw(texts), token_ids, logprobs, draw(st.integers(0, 3)))))
    ends = [(index, TextDelta("b", (41,), finish_reason=FinishReason.LENGTH)) for index in (0, 1)]
    return [*steps, *ends]


def expected(shape: Shape, steps: list[tuple[int, TextDelta]], with_usage: bool) -> list[dict[str, Any]]:
    """Every chunk as a dict of its own."""
    head = {**HEAD, "object": shape.chunk_object_name, **shape.head([])}
    if with_usage:
        head["usage"] = None
    chunks = []
    for index, delta in steps:
        for choice in shape.chunks(index, delta):
            chunks.append({**head, "choices": [choice]})
            head.pop("prompt_token_ids", None)
    if with_usage:
        of = [[delta for i, delta in steps if i == index] for index in (0, 1)]
        generated = [sum(len(delta.token_ids) for delta in each) for each in of]
        cached = [max(delta.num_cached_tokens for delta in each) for each in of]
        chunks.append({**head, "choices": [], "usage": usage(REQUESTS, generated, cached)})
    return chunks


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(each.removeprefix(b"data: ")) for each in data.split(b"\n\n") if each]


@pytest.mark.parametrize("make", [completions, chat])
@given(
    steps=deltas(),
    extras=st.sampled_from([NO_EXTRAS, Extras(token_ids=True)]),
    has_echo=st.booleans(),
    with_usage=st.booleans(),
)
def test_chunks_are_those_of_the_shape_byte_by_byte(
    make: MakeShape,
    steps: list[tuple[int, TextDelta]],
    extras: Extras,
    has_echo: bool,
    with_usage: bool,
) -> None:
    events = ChunkEvents(make(extras, has_echo), HEAD, REQUESTS, with_usage=with_usage)
    data = events.first() + b"".join(events.of(index, delta) for index, delta in steps) + events.last()
    wanted = expected(make(extras, has_echo), steps, with_usage)
    assert data == b"".join(map(event, wanted))


def test_requests_that_generate_nothing_are_in_the_first_events() -> None:
    requests = [replace(each, generates=False) for each in REQUESTS]
    events = ChunkEvents(CompletionShape(TOKENIZER, requests), HEAD, requests, with_usage=False)
    chunks = chunks_of(events.first())
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length", "length"]


@pytest.mark.parametrize("make", [completions, chat])
@given(steps=deltas(), extras=st.sampled_from([NO_EXTRAS, Extras(token_ids=True)]), with_usage=st.booleans())
def test_a_running_usage_is_that_of_the_choice_so_far(
    make: MakeShape, steps: list[tuple[int, TextDelta]], extras: Extras, with_usage: bool
) -> None:
    events = ChunkEvents(make(extras, False), HEAD, REQUESTS, with_usage=with_usage, with_running_usage=True)
    plain = ChunkEvents(make(extras, False), HEAD, REQUESTS, with_usage=with_usage)
    generated, cached = [0, 0], [0, 0]
    for index, delta in steps:
        generated[index] += len(delta.token_ids)
        cached[index] = max(cached[index], delta.num_cached_tokens)
        chunks, others = chunks_of(events.of(index, delta)), chunks_of(plain.of(index, delta))
        for chunk, other in zip(chunks, others, strict=True):
            assert chunk.pop("usage") == usage([REQUEST], [generated[index]], [cached[index]])
            assert other.pop("usage", None) is None
            assert chunk == other
    assert events.last() == plain.last()
