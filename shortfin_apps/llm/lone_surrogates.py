r"""Replaces lone surrogates (halves of a UTF-16 surrogate pair) in text and JSON with U+FFFD.

JavaScript clients may truncate a string within a surrogate pair. Half of the pair then stays in the client's
history and is sent with every later turn. JSON can contain it, as `\ud83d`, but UTF-8 cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_ESCAPED = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_ENCODED = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")  # surrogates as three bytes, which is invalid UTF-8
_BACKSLASH, _MARK = rb"\\", b"\\\0"


def encodable(text: str) -> str:
    """Replace lone surrogates in a string with U+FFFD, so that the string can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_of(value: Any, option: int = 0) -> bytes:
    """Return a value as JSON, with lone surrogates in its strings replaced; `option` is orjson's.

    Raises TypeError for values that JSON cannot express.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # orjson raises this for strings with surrogates, too
        return orjson.dumps(_encodable(value), option=option)


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return encodable(value)
        case Mapping():
            return {_encodable(name): _encodable(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_encodable(inner) for inner in value]
        case _:
            return value


def without_lone_surrogates(text: bytes) -> bytes:
    """Replace each lone surrogate in JSON bytes, whether escaped or encoded, with U+FFFD, in linear time."""
    if b"\xed" in text:
        text = _ENCODED.sub("\ufffd".encode(), text)
    if rb"\u" not in text or b"\0" in text:  # a null byte is invalid in JSON and used as a mark below
        return text
    # Escaped backslashes are replaced temporarily, so that every other backslash is the start of an escape.
    marked = text.replace(_BACKSLASH, _MARK)
    return _LONE_ESCAPED.sub(rb"\\ufffd", marked).replace(_MARK, _BACKSLASH)
