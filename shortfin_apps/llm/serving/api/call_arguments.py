"""Parses the arguments of a tool call, a JSON string that may be truncated or malformed, as an object."""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from typing import Any, Literal

from pydantic_core import from_json

logger = logging.getLogger(__name__)

UNPARSED = "unparsed_arguments"  # the key of the raw string if the arguments are not a JSON object
MAX_DEPTH = 24  # a deeper object would exceed Limits when the client sends it back in its next request
_STRING_OR_LAST_COMMA = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|,(?=\s*[}\]])', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def arguments_in_history(text: str) -> dict[str, Any]:
    """Parse the arguments of a tool call in the conversation history.

    A truncated string value at the end is kept. Arguments that are not a JSON object are returned under the
    key UNPARSED. Logs a warning, once per process, if arguments are not a complete JSON object.
    """
    try:
        value = json.loads(text, strict=False) if text.strip() else {}
    except (ValueError, RecursionError):
        _warn()
        return read_arguments(text, allow_partial="trailing-strings")
    if value is None:
        return {}
    if isinstance(value, dict) and not _is_deep(value):
        return value
    _warn()
    return {UNPARSED: text}


def read_arguments(text: str, *, allow_partial: Literal[True, "trailing-strings"]) -> dict[str, Any]:
    """Parse `text` as a JSON object, which may be truncated.

    Trailing commas and raw control characters in strings are accepted, because models write them. Text that
    is not an object is returned under the key UNPARSED.
    """
    try:
        mended = _STRING_OR_LAST_COMMA.sub(_mend, text)
        value = from_json(mended.strip() or "{}", allow_partial=allow_partial, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) and not _is_deep(value) else {UNPARSED: text}


def _mend(match: re.Match[str]) -> str:
    token = match[0]
    return "" if token == "," else _CONTROL.sub(lambda char: f"\\u{ord(char[0]):04x}", token)


def _is_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _items(container: dict[str, Any] | list[Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


@cache  # warns once per process
def _warn() -> None:
    logger.warning(
        "a conversation has a call with arguments that are not a JSON object (one that was cut, for example):"
        " the chat template is given what can be read of them"
    )
