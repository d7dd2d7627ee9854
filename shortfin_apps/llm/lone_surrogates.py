r"""Replaces lone surrogates in texts and JSON, which are not characters, with U+FFFD.

A client that cuts a text within a surrogate pair, as JavaScript code may, keeps half of the pair in its
history and sends it with every later turn. JSON can contain it, as `\ud83d`, but no Unicode text can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_ESCAPED = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_ENCODED = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")  # invalid in UTF-8
_BACKSLASH, _MARK = rb"\\", b"\\\0"


def encodable(text: str) -> str:
    """Replaces lone surrogates from JSON or bad input, which no stream can encode, with U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_of(value: Any, option: int = 0) -> bytes:
    """Returns the JSON of a value with possibly untrusted text, made encodable; `option` is orjson's.

    Raises TypeError for values that JSON cannot express.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # also orjson's error for a text with surrogates
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
    """Replaces each lone surrogate in a JSON text, escaped or encoded, with U+FFFD, in linear time."""
    if b"\xed" in text:
        text = _ENCODED.sub("\ufffd".encode(), text)
    if rb"\u" not in text or b"\0" in text:  # the second is not JSON
        return text
    # Escaped backslashes are replaced temporarily, so that each other backslash begins an escape.
    marked = text.replace(_BACKSLASH, _MARK)
    return _LONE_ESCAPED.sub(rb"\\ufffd", marked).replace(_MARK, _BACKSLASH)
