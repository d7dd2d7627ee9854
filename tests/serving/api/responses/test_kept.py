from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.limits import MAX_CONTAINERS, Limits
from shortfin_apps.llm.serving.api.responses.conversation import messages_of
from shortfin_apps.llm.serving.api.responses.schema import Item
from shortfin_apps.llm.serving.api.responses.store import (
    ITEMS,
    StoredResponse,
    encoded,
    items_before,
    items_of,
    page_of,
)
from tests.serving.api.responses.test_conversation import ANSWER, CALL, RESULT, THOUGHT, USER

GIVEN: list[Any] = [USER, THOUGHT, ANSWER, CALL, RESULT]
LIMITS = Limits()
INPUTS = st.lists(st.sampled_from(GIVEN), max_size=8)


def to_store(response: dict[str, Any], items: Sequence[Item]) -> StoredResponse:
    return StoredResponse(response=orjson.dumps(response), items=encoded(items))


@given(INPUTS, st.lists(st.sampled_from([THOUGHT, ANSWER, CALL]), max_size=3))
def test_a_conversation_goes_on_as_it_was(given_items: list[Any], output: list[Any]) -> None:
    items = ITEMS.validate_python(given_items)
    before = items_before(to_store({"output": output}, items), LIMITS)
    assert messages_of(before) == messages_of(ITEMS.validate_python([*given_items, *output]))


@given(INPUTS, st.integers(1, 4), st.sampled_from(["asc", "desc"]))
def test_pages_join_to_the_whole(given_items: list[Any], limit: int, order: str) -> None:
    stored = to_store({"output": []}, ITEMS.validate_python(given_items))
    whole = page_of(stored, after=None, limit=100, order=order)["data"]
    found: list[Any] = []
    after, has_more = None, True
    while has_more:
        page = page_of(stored, after=after, limit=limit, order=order)
        found += page["data"]
        after, has_more = page["last_id"], page["has_more"]
    assert found == whole
    assert len({item["id"] for item in whole}) == len(whole)
    assert len(whole) == len(given_items)


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = page_of(to_store({}, items_of("hi")), after=None, limit=1, order="asc")["data"]
    assert item["id"].startswith("msg_")
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hi"}])


@pytest.mark.parametrize(
    ("item", "number", "limits", "message"),
    [
        (b'{"type":"function_call"}', MAX_CONTAINERS, LIMITS, "more than 20,000 arrays and objects"),
        (b"{" + b",".join([b'"a":0'] * 60) + b"}", 2_000, LIMITS, "more than 100,000 names"),
        (b'"' + b"x" * 100 + b'"', 20, Limits(body_bytes=2_000), "more than 2,000 bytes"),
    ],
    ids=["items", "names", "bytes"],
)
def test_a_conversation_is_bounded_before_it_is_decoded(
    item: bytes, number: int, limits: Limits, message: str
) -> None:
    stored = StoredResponse(response=b"not JSON", items=b"[" + b",".join([item] * number) + b"]")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        items_before(stored, limits)
    assert caught.value.param == "previous_response_id"
