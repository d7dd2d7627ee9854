"""The parts of a GGUF model, and the single values in its metadata, read without arrays and tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_ITEMS,
    MAX_KEYS,
    MAX_TEXT_BYTES,
    check_at_most,
)
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import PART

# Part names of llama.cpp's llama-gguf-split.
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# struct formats of value types, by type number (docs/gguf.md of llama.cpp).
_NUMBERS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Scalar = str | int | float | bool


class _EndsTooEarlyError(ValueError):
    def __str__(self) -> str:
        return "it ends too early"


def read_scalars(path: Path) -> dict[str, Scalar]:
    """Return every key with a single value. Raises BuildError if the file is not GGUF or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return dict(_Reader(str(path), data).scalars())
    except (OSError, ValueError, RecursionError) as error:  # an empty file cannot be mapped
        raise BuildError(f"{path}: not a readable GGUF file ({error})") from error


def scalars_at_start(where: str, start: bytes) -> dict[str, Scalar]:
    """Return the keys with a single value in a file's first bytes, `start`.

    Raises BuildError if it is not a GGUF file.
    """
    found: dict[str, Scalar] = {}
    try:
        for key, value in _Reader(where, start).scalars():
            found[key] = value
    except _EndsTooEarlyError:
        return found
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not a readable GGUF file ({error})") from error
    return found


class _Reader:
    def __init__(self, where: str, data: mmap.mmap | bytes) -> None:
        self._where = where
        self._data = data
        self._at = 0
        self._num_items = 0

    def scalars(self) -> Iterator[tuple[str, Scalar]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with `GGUF`")
        self._at = 4
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        self._number("Q")  # number of tensors
        num_keys = self._number("Q")
        check_at_most(self._where, "it has {} keys", num_keys, MAX_KEYS)
        for _ in range(num_keys):
            key, value = self._text(), self._value(self._number("I"))
            if value is not None:
                yield key, value

    def _value(self, kind: int) -> Scalar | None:
        """Return the next value; None for an array, which is skipped."""
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            self._pass_array()
            return None
        return self._number(_form(kind))

    def _pass_array(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        self._num_items += count
        check_at_most(self._where, "its arrays have {} items", self._num_items, MAX_ITEMS)
        pass_one = {_STRING: self._pass_text, _ARRAY: self._pass_array}.get(kind)
        if pass_one is None:
            self._skip(count * struct.calcsize(_form(kind)))
            return
        for _ in range(count):
            pass_one()

    def _text(self) -> str:
        size = self._number("Q")
        check_at_most(self._where, "a text has {} bytes", size, MAX_TEXT_BYTES)
        start = self._at
        self._skip(size)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _pass_text(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, form: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form))
        [value] = struct.unpack_from(f"<{form}", self._data, start)
        return value  # type: ignore[no-any-return]

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise _EndsTooEarlyError


def _form(kind: int) -> str:
    """Return the struct format of a number type."""
    if kind not in _NUMBERS:
        raise ValueError(f"a value has type {kind}")
    return _NUMBERS[kind]


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to; the first has its metadata. Raises BuildError."""
    match = PART.fullmatch(path.stem)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number + 1:05}-of-{count:05}{path.suffix}" for number in range(count)]
    parts = [path.with_name(name) for name in names]
    if path not in parts:
        raise BuildError(f"{path}: is none of its {count} parts")
    if missing := [part for part in parts if not part.exists()]:
        raise BuildError(f"{missing[0]}: no such file; {path.name} is one of {count} parts")
    return parts
