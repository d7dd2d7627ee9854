"""Stores responses for a limited time, so that clients need not send the conversation again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.limits import Limits, excess_of
from shortfin_apps.llm.serving.api.responses.schema import Item, MessageItem

MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the list of its input items from the whole conversation; both encoded as JSON."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Stores at most `max_responses` responses of `max_bytes` in total, each for `ttl_s`.

    Owners cannot access each other's responses. When a limit is exceeded, the owner with the most responses
    (or bytes, for `max_bytes`) loses its oldest response, so that no owner can evict the responses of others
    by storing many. Each call drops expired responses. `clock` (seconds) must be monotonic.
    """

    def __init__(
        self,
        max_responses: int,
        ttl_s: float,
        clock: Callable[[], float],
        max_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._ages: dict[tuple[str, str], float] = {}  # time of `put` by owner and id, oldest first
        self._owned: dict[str, dict[str, StoredResponse]] = {}  # by owner and id, oldest first
        self._owned_bytes: dict[str, int] = {}
        self.num_bytes = 0  # of all responses

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0

    @property
    def num_responses(self) -> int:
        return len(self._ages)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> bool:
        """Store a response under a new id. Returns False if the store has no room for the response."""
        self._drop_expired()
        if not self.keeps_any or response.num_bytes > self._max_bytes:
            return False
        assert (owner, response_id) not in self._ages, "ids are random"
        self._ages[owner, response_id] = self._clock()
        self._owned.setdefault(owner, {})[response_id] = response
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + response.num_bytes
        self.num_bytes += response.num_bytes
        while self.num_responses > self._max_responses:
            self._drop_oldest_of(max(self._owned, key=lambda each: len(self._owned[each])))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest_of(max(self._owned_bytes, key=self._owned_bytes.__getitem__))
        return (owner, response_id) in self._ages

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response; None if it is missing or another owner's."""
        self._drop_expired()
        return self._owned.get(owner, {}).get(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete the response. Returns False if it is missing or another owner's."""
        self._drop_expired()
        if (owner, response_id) not in self._ages:
            return False
        self._drop(owner, response_id)
        return True

    def _drop_expired(self) -> None:
        newest_expired_s = self._clock() - self._ttl_s
        while self._ages:
            (owner, response_id), put_s = next(iter(self._ages.items()))
            if put_s > newest_expired_s:
                return
            self._drop(owner, response_id)

    def _drop_oldest_of(self, owner: str) -> None:
        self._drop(owner, next(iter(self._owned[owner])))

    def _drop(self, owner: str, response_id: str) -> None:
        del self._ages[owner, response_id]
        num_bytes = self._owned[owner].pop(response_id).num_bytes
        self._owned_bytes[owner] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._owned[owner]:
            del self._owned[owner], self._owned_bytes[owner]


ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """Return the input of a body as items: a string becomes a user message."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


def items_before(stored: StoredResponse, limits: Limits) -> list[Item]:
    """Return the conversation so far: input and output of a stored response. Slow for a long conversation.

    Raises InvalidRequestError if the input exceeds the limits of a body, because chained responses add up.
    """
    is_large = len(stored.items) > limits.body_bytes
    excess = f"{limits.body_bytes:,} bytes" if is_large else excess_of(stored.items)
    if excess is not None:
        raise InvalidRequestError(
            f"`previous_response_id`: the conversation so far has more than {excess}; begin a new one, with"
            " the items that it needs in `input`",
            "previous_response_id",
        )
    output = orjson.loads(stored.response)["output"]
    return ITEMS.validate_python([*orjson.loads(stored.items), *output])


def encoded(items: Sequence[Item]) -> bytes:
    """Encode the items as JSON, each with a unique id for pagination. Slow for many items."""
    dumped: list[dict[str, Any]] = ITEMS.dump_python(list(items), by_alias=True, exclude_none=True)
    code, ids = uuid4().hex, set[str]()
    for index, (entry, item) in enumerate(zip(dumped, items, strict=True)):
        if entry.get("id") is None or entry["id"] in ids:  # a client may repeat an id
            entry["id"] = f"{ITEM_PREFIXES[item.type]}_{code}_{index}"
        ids.add(entry["id"])
    return orjson.dumps(dumped)


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in the API's list format: a message's string content becomes a list of one part."""
    if item["type"] != "message" or not isinstance(text := item["content"], str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": text}]}


def page_of(stored: StoredResponse, *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """Return a page of a response's input items. Slow for a long input.

    `after`: id of the previous page's last item; the page starts with the first item if it is unknown.
    """
    items = orjson.loads(stored.items)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    begin = ids.index(after) + 1 if after in ids else 0
    page = [_listed(item) for item in items[begin : begin + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }
