"""The JSON of a request's body, from a program's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def json_body(value: Any, option: int = 0) -> bytes:
    """The JSON of a value, with U+FFFD for lone surrogates, which no server takes; `option` is orjson's.

    Raises TypeError for what JSON cannot express.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # which is also orjson's error for a text with surrogates
        return orjson.dumps(_without_surrogates(value), option=option)


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return without_surrogates(value)
        case Mapping():
            return {_without_surrogates(name): _without_surrogates(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without_surrogates(inner) for inner in value]
        case _:
            return value
