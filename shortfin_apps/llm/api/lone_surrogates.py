"""Replaces lone surrogates in JSON texts, which are no characters, with U+FFFD.

A client that cuts a text within a pair of surrogates, as JavaScript's do, keeps half of it in its history and
sends it with every later turn. JSON may hold it, as `\\ud83d`, but no Unicode text can.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_ESCAPED = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_ENCODED = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")  # as no valid UTF-8 has them
_BACKSLASH, _MARK = rb"\\", b"\\\0"


def json_of(value: Any) -> bytes:
    """The JSON of a value that may quote a client's or a model's text, with U+FFFD for lone surrogates."""
    try:
        return orjson.dumps(value)
    except TypeError:  # also orjson's error for such a text
        return without_lone_surrogates(json.dumps(value).encode())


def without_lone_surrogates(text: bytes) -> bytes:
    """The same JSON text with U+FFFD for each lone surrogate, escaped or encoded; linear in the text."""
    if b"\xed" in text:
        text = _ENCODED.sub("\ufffd".encode(), text)
    if rb"\u" not in text or b"\0" in text:  # the second is not JSON
        return text
    # Escaped backslashes are marked meanwhile, so that each other backslash begins an escape.
    marked = text.replace(_BACKSLASH, _MARK)
    return _LONE_ESCAPED.sub(rb"\\ufffd", marked).replace(_MARK, _BACKSLASH)
