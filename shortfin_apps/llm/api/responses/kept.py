"""What a stored response is made of, and the conversation that goes on behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from shortfin_apps.llm.api.responses.schema import Item, MessageItem
from shortfin_apps.llm.api.responses.store import StoredResponse

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """The input of a body as items: a text is a message of the user."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else list(given)


def items_before(stored: StoredResponse) -> list[Item]:
    """The conversation so far: the input of a stored response, and its output."""
    output = orjson.loads(stored.response)["output"]
    return ITEMS.validate_python([*orjson.loads(stored.items), *output])


def to_store(response: dict[str, Any], items: Sequence[Item]) -> StoredResponse:
    """Gives each item an id, by which pages of the input are told."""
    listed = list(map(_listed, items))
    ids: set[str] = set()
    for entry, item in zip(listed, items, strict=True):
        if entry.get("id") is None or entry["id"] in ids:  # two of the client's may be the same
            entry["id"] = f"{ITEM_PREFIXES[item.type]}_{uuid4().hex}"
        ids.add(entry["id"])
    return StoredResponse(response=orjson.dumps(response), items=orjson.dumps(listed))


def _listed(item: Item) -> dict[str, Any]:
    """An item as it is listed: a message's content is a list of parts."""
    dumped = item.model_dump(by_alias=True, exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        dumped["content"] = [{"type": kind, "text": item.content}]
    return dumped


def page_of(stored: StoredResponse, *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A page of a response's input; `after` is the id of the last item of the page before it."""
    items = orjson.loads(stored.items)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    begin = ids.index(after) + 1 if after in ids else 0
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }
