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
    """The counts of a JSON text; at least the counts up to the first error of a text that is not JSON.

    Linear in the text, with a few passes in C: quotes are removed in pairs, which leaves the characters
    within strings within strings.
    """
    escaped_quotes_dropped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = escaped_quotes_dropped.translate(None, _DROPPED).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    names = outside.count(b":")
    return JsonCounts(len(outside) - names, names)


def most_counts_of(text: bytes) -> JsonCounts:
    """Upper bounds of the counts, in a fraction of the time: characters within strings are counted, too."""
    return JsonCounts(text.count(b"[") + text.count(b"{"), text.count(b":"))
