"""Random bodies get an answer in the documented format, never a 5xx."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.anthropic.schema import BLOCK_TAGS, CountTokensBody, MessagesBody
from shortfin_apps.llm.serving.api.responses.schema import ITEM_TAGS, PART_TAGS, ResponsesBody
from shortfin_apps.llm.serving.api.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    SamplingBody,
)
from tests.matrices import slow_but
from tests.serving.api.harness import BASE_URL, Harness, bodies

JSON = {"content-type": "application/json"}
EXPECTED = {200, 400, 404, 413}
HARNESS = Harness()  # of all requests, as making the routes takes longer than to answer one

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def fields_of(*kinds: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of these bodies, with random values."""
    names = [name for body in kinds for name in (*body.model_fields, *body.REFUSED)]
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


sampling = fields_of(SamplingBody)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user") | values}, optional={"content": values}))
# Entries of a type that is known, or of none, with some fields of any of them.
entries = st.builds(
    lambda kind, fields: fields | kind,
    st.fixed_dictionaries({}, optional={"type": st.sampled_from([*BLOCK_TAGS, *ITEM_TAGS, *PART_TAGS])}),
    fields_of(*(each for each in bodies() if each.__module__.split(".")[-2] in ("anthropic", "responses"))),
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.lists(entries, max_size=3) | st.text(max_size=3),
        }
    ),
    max_size=3,
)
items = st.lists(entries, max_size=4) | turns
BODIES = {
    "/generate": st.tuples(
        st.fixed_dictionaries(
            {"text": st.just("hello") | st.lists(st.text(max_size=3), max_size=3) | values},
            optional={"sampling_params": sampling | st.lists(sampling, max_size=3) | values},
        ),
        fields_of(GenerateBody),
    ),
    "/v1/completions": st.tuples(
        st.fixed_dictionaries({"prompt": st.just("hello") | values}), fields_of(CompletionBody)
    ),
    "/v1/chat/completions": st.tuples(
        st.fixed_dictionaries({"messages": messages | values}), fields_of(ChatBody, ChatMessage)
    ),
    "/v1/responses": st.tuples(
        st.fixed_dictionaries({"input": st.just("hello") | items | values}), fields_of(ResponsesBody)
    ),
    "/v1/messages": st.tuples(
        st.fixed_dictionaries({"messages": turns | values, "max_tokens": st.just(9) | values}),
        fields_of(MessagesBody),
    ),
    "/v1/messages/count_tokens": st.tuples(
        st.fixed_dictionaries({"messages": turns | values}), fields_of(CountTokensBody)
    ),
}


def post(path: str, **content: Any) -> httpx.Response:
    """The answer of an application; asserts that no request is left in its engine."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=HARNESS.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
            response = await client.post(path, headers=JSON, **content)
        assert not HARNESS.engine.live
        return response

    return asyncio.run(ask())


def check(response: httpx.Response) -> None:
    assert response.status_code in EXPECTED, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message


@pytest.mark.parametrize("path", slow_but(["/generate", "/v1/chat/completions"], BODIES))
@settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_json_gets_a_documented_answer(path: str, data: st.DataObject) -> None:
    required, more = data.draw(BODIES[path])
    check(post(path, json=more | required))


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=50, derandomize=True, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200) | values.map(lambda value: repr(value).encode("utf-8", "replace")))
def test_any_bytes_get_a_documented_answer(path: str, content: bytes) -> None:
    check(post(path, content=content))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308 * 10])
def test_nan_and_infinity_are_refused(path: str, number: float) -> None:
    required = '"prompt": "a", "text": "a", "messages": [], "input": "a", "max_tokens": 9'
    content = f'{{{required}, "temperature": {number}}}'
    assert post(path, content=content.encode()).status_code == 400
