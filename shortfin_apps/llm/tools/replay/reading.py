"""Finds receipts in a file that holds a receipt, a complete answer, a stream, or one of them per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import orjson

from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError

STDIN = "-"
EVENT = "data:"  # prefix of a line in a stream; the stream ends with [DONE] and may contain comments


def read_receipts(source: str) -> list[Receipt]:
    """Return the receipts in a file, or on stdin for `-`.

    Raises ReceiptError if there is no receipt, or one that is invalid.
    """
    receipts = list(receipts_in(_text(source)))
    if not receipts:
        raise ReceiptError(f'{source}: holds no receipt; an answer has one if `"receipt": true` asks for it')
    return receipts


def receipts_in(text: bytes) -> Iterator[Receipt]:
    """Yield the receipts in one JSON document, or in one document per line. Raises ReceiptError."""
    for value in _documents(text):
        yield from map(Receipt.parse, _found_in(value))


def _text(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == STDIN else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ReceiptError(f"{source!r}: cannot be read ({reason})") from error


def _documents(text: bytes) -> Iterator[object]:
    try:
        yield orjson.loads(text)
        return
    except orjson.JSONDecodeError:
        lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        data = line.strip().removeprefix(EVENT.encode()).strip()
        if not data or data == b"[DONE]" or data.startswith(b":"):
            continue
        try:
            yield orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ReceiptError(f"line {number} is not JSON ({error})") from None


def _found_in(document: object) -> Iterator[object]:
    """Yield the receipts in a JSON document, at any depth and in order; the document may be one itself."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "prompt_ids" in value or ("output_ids" in value and "marks" in value):
                yield value
            else:
                left += reversed(list(value.values()))
        elif isinstance(value, list):
            left += reversed(value)
