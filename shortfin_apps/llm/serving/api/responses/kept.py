"""Converts between stored responses and the items of the conversation that continues them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.limits import Limits, excess_of
from shortfin_apps.llm.serving.api.responses.schema import Item, MessageItem
from shortfin_apps.llm.serving.api.responses.store import StoredResponse

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """Return the input of a body as items: a text becomes a user message."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


def items_before(stored: StoredResponse, limits: Limits) -> list[Item]:
    """Return the conversation so far: a stored response's input and output. Slow for a long one.

    Raises InvalidRequestError if it exceeds the limits of a body, as chained responses add up.
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
    """Encode the items as JSON, each with a unique id for pagination. Slow for many."""
    dumped: list[dict[str, Any]] = ITEMS.dump_python(list(items), by_alias=True, exclude_none=True)
    code, ids = uuid4().hex, set[str]()
    for index, (entry, item) in enumerate(zip(dumped, items, strict=True)):
        if entry.get("id") is None or entry["id"] in ids:  # a client may repeat an id
            entry["id"] = f"{ITEM_PREFIXES[item.type]}_{code}_{index}"
        ids.add(entry["id"])
    return orjson.dumps(dumped)


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as the API lists it: a message's content becomes a list of parts."""
    if item["type"] != "message" or not isinstance(text := item["content"], str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": text}]}


def page_of(stored: StoredResponse, *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """Return a page of a response's input; `after` is the id of the previous page's last item.

    Slow for a long input.
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
