"""The store against a model of lists, under any order of calls and any lapse of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.limits import MAX_CONTAINERS, Limits
from shortfin_apps.llm.serving.api.responses.conversation import messages_of
from shortfin_apps.llm.serving.api.responses.schema import Item
from shortfin_apps.llm.serving.api.responses.store import (
    ITEMS,
    ResponseStore,
    StoredResponse,
    encoded,
    items_before,
    items_of,
    page_of,
)
from tests.serving.api.responses.test_conversation import ANSWER, CALL, RESULT, THOUGHT, USER

MAX_RESPONSES, MAX_BYTES, TTL_S = 4, 100, 10.0
OWNERS = st.sampled_from(["", "a", "b"])
NUMBERS = st.integers(0, 30)


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(response=b"r" * (num_bytes // 2), items=b"i" * (num_bytes - num_bytes // 2))


@dataclass(frozen=True)
class Kept:
    owner: str
    response_id: str
    num_bytes: int
    put_s: float


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.store = ResponseStore(MAX_RESPONSES, TTL_S, lambda: self.now_s, MAX_BYTES)
        self.kept: list[Kept] = []  # oldest first
        self.num_put = 0

    @rule(seconds=st.floats(0, 2 * TTL_S, allow_nan=False))
    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(owner=OWNERS, num_bytes=st.integers(0, MAX_BYTES + 5))
    def put(self, owner: str, num_bytes: int) -> None:
        self.num_put += 1
        new = Kept(owner, f"r{self.num_put}", num_bytes, self.now_s)
        is_kept = self.store.put(owner, new.response_id, stored(num_bytes))
        self.expire()
        if num_bytes <= MAX_BYTES:
            self.kept.append(new)
        found = [each for each in self.kept if self.store.get(each.owner, each.response_id) is not None]
        assert found in list(self.outcomes(self.kept))
        self.kept = found
        assert is_kept == (new in self.kept)

    @rule(owner=OWNERS, number=NUMBERS)
    def delete(self, owner: str, number: int) -> None:
        self.expire()
        found = [each for each in self.kept if (each.owner, each.response_id) == (owner, f"r{number}")]
        assert self.store.delete(owner, f"r{number}") == bool(found)
        self.kept = [each for each in self.kept if each not in found]

    @rule(owner=OWNERS, number=NUMBERS)
    def get(self, owner: str, number: int) -> None:
        self.expire()
        sizes = [
            each.num_bytes for each in self.kept if (each.owner, each.response_id) == (owner, f"r{number}")
        ]
        got = self.store.get(owner, f"r{number}")
        assert ([] if got is None else [got.num_bytes]) == sizes

    @invariant()
    def is_bounded(self) -> None:
        assert self.store.num_responses <= MAX_RESPONSES
        assert self.store.num_bytes <= MAX_BYTES

    def expire(self) -> None:
        self.kept = [each for each in self.kept if each.put_s > self.now_s - TTL_S]

    def outcomes(self, kept: list[Kept]) -> Iterator[list[Kept]]:
        """What may be left: which of several owners with the same share loses one is up to the store."""
        owners = {each.owner for each in kept}
        if len(kept) > MAX_RESPONSES:
            shares = {owner: sum(each.owner == owner for each in kept) for owner in owners}
        elif sum(each.num_bytes for each in kept) > MAX_BYTES:
            shares = {owner: sum(e.num_bytes for e in kept if e.owner == owner) for owner in owners}
        else:
            yield kept
            return
        for greediest in (owner for owner in owners if shares[owner] == max(shares.values())):
            gone = next(each for each in kept if each.owner == greediest)
            yield from self.outcomes([each for each in kept if each is not gone])


TestStore = StoreMachine.TestCase


def test_nothing_is_kept_without_room() -> None:
    store = ResponseStore(0, TTL_S, lambda: 0.0)
    assert not store.keeps_any
    assert not store.put("", "r", stored(1))


def test_an_owner_with_many_responses_does_not_drive_out_those_of_others() -> None:
    store = ResponseStore(3, TTL_S, lambda: 0.0)
    store.put("quiet", "q", stored(1))
    for number in range(50):
        store.put("loud", str(number), stored(1))
    assert store.get("quiet", "q") is not None


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
