"""Writes SentencePiece files, as protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = [value & 127]
    while value := value >> 7:
        parts[-1] |= 128
        parts.append(value & 127)
    return bytes(parts)


def message(fields: Mapping[int, Any]) -> bytes:
    """Of integers, floats, text, bytes and lists of messages, by their numbers."""
    return b"".join(_field(number, value) for number, value in fields.items())


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, list):
        return b"".join(_field(number, each) for each in value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def sentencepiece_model(
    pieces: Sequence[tuple[str, float, int]],
    trainer: Mapping[int, Any] | None = None,
    normalizer: Mapping[int, Any] | None = None,
) -> bytes:
    """A BPE model unless the fields of `trainer` and `normalizer` say otherwise."""
    parts = [message({1: text, 2: score, 3: kind}) for text, score, kind in pieces]
    fields = {3: 2, 35: 1, 43: -1, **(trainer or {})}
    return message({1: parts, 2: message(fields), 3: message({3: 1, 4: 0, **(normalizer or {})})})
