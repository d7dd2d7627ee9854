"""Counts the parts of a JSON text without parsing it: parsing a million empty arrays takes a second."""

from __future__ import annotations

from typing import NamedTuple

_KEPT = b'"[{:'
_DROPPED = bytes(set(range(256)) - set(_KEPT))


class JsonCounts(NamedTuple):
    """`containers` are arrays and objects, `names` the members of all objects."""

    containers: int
    names: int


def counts_of(text: bytes) -> JsonCounts:
    """Count the parts of a JSON text. Invalid JSON is counted at least up to its first error.

    Linear in the text, with a few passes in C: removing quotes in pairs leaves the characters in nested
    strings.
    """
    escaped_quotes_dropped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = escaped_quotes_dropped.translate(None, _DROPPED).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    names = outside.count(b":")
    return JsonCounts(len(outside) - names, names)


def most_counts_of(text: bytes) -> JsonCounts:
    """Return upper bounds in a fraction of the time: characters in strings are counted, too."""
    return JsonCounts(text.count(b"[") + text.count(b"{"), text.count(b":"))
