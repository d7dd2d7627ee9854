"""Read the metadata and the tensors of a GGUF file, and find all files of a model in split files.

The format is defined in ggml's docs/gguf.md. The sizes of metadata are limited (metadata_limits.py), as it
becomes Python objects.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderField, ReaderTensor
from gguf.quants import quant_shape_to_byte_shape

from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    check_at_most,
)
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import PART

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
# First bytes of what is given or downloaded instead of a GGUF file -> what it is, and what to do.
_OTHER_FILES = {
    **dict.fromkeys((b"lmgg", b"tjgg"), "it is of GGML, the format before GGUF; download a GGUF file"),
    b"vers": "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`",
    **dict.fromkeys((b"<!do", b"<!DO", b"<htm"), "it is a web page; download the file itself"),
}
# Number of a type that was removed -> its name: Q4_0 and IQ4_NL with rows interleaved for CPUs.
_INTERLEAVED = dict(enumerate(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), start=31)) | dict(
    enumerate(("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"), start=36)
)
# Number of a scalar's value type -> its struct format.
_NUMBERS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DTYPES = {
    f"{'F' if kind == 'f' else 'I'}{8 * size}": f"<{kind}{size}" for kind in "fi" for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata by key, and its tensors, whose data is memory-mapped."""

    metadata: dict[str, Any]
    tensors: list[ReaderTensor]


class _EndsTooEarlyError(ValueError):
    def __str__(self) -> str:
        return "it ends too early"


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and map its tensors. Raises BuildError if it is not GGUF or ends too early."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        reader = _Reader(str(path), data)
        metadata = dict(reader.metadata())
        return GgufFile(metadata, list(reader.tensors(metadata)))
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # an empty file cannot be mapped
        raise BuildError(f"{path}: not a readable GGUF file ({error})") from error


def metadata_at_start(where: str, start: bytes) -> dict[str, Any]:
    """Return the metadata that is complete in `start`, the first bytes of a file.

    Raises BuildError if the file is not a GGUF file.
    """
    found: dict[str, Any] = {}
    try:
        for key, value in _Reader(where, memoryview(start)).metadata():
            found[key] = value
    except _EndsTooEarlyError:
        return found
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not a readable GGUF file ({error})") from error
    return found


class _Reader:
    def __init__(self, where: str, data: memoryview) -> None:
        self._where = where
        self._data = data
        self._at = 0
        self._num_items = 0
        self._num_tensors = 0

    def metadata(self) -> Iterator[tuple[str, Any]]:
        """Yield each metadata key with its value."""
        if (magic := bytes(self._data[:4])) != _MAGIC:
            raise ValueError(_OTHER_FILES.get(magic, "it does not begin with `GGUF`"))
        self._at = 4
        _check_version(self._number("I"))
        self._num_tensors, num_keys = self._number("Q"), self._number("Q")
        check_at_most(self._where, "it has {} keys", num_keys, MAX_KEYS)
        seen: set[str] = set()
        for _ in range(num_keys):
            if (key := self._text()) in seen:
                raise ValueError(f"it has two keys `{key}`")
            seen.add(key)
            yield key, self._value(self._number("I"))

    def tensors(self, metadata: dict[str, Any]) -> Iterator[ReaderTensor]:
        """Yield the tensors. Callers must have consumed `metadata()` before, and pass its items."""
        check_at_most(self._where, "it has {} tensors", self._num_tensors, MAX_TENSORS)
        infos = [self._tensor_info() for _ in range(self._num_tensors)]
        if len({name for name, *_ in infos}) < len(infos):
            raise ValueError("it has two tensors of the same name")
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = self._at + -self._at % alignment
        for name, shape, kind, offset in infos:
            yield self._tensor(name, shape, _tensor_type(name, kind), start + offset)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, its sizes (innermost dimension first), its type number and its offset."""
        name = self._text("a tensor's name has {} bytes", MAX_NAME_CHARS)
        num_dims = self._number("I")
        check_at_most(self._where, "a tensor has {} dimensions", num_dims, MAX_DIMENSIONS)
        return name, tuple(self._number("Q") for _ in range(num_dims)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, sizes: tuple[int, ...], kind: GGMLQuantizationType, at: int) -> ReaderTensor:
        num_weights, num_bytes = GGML_QUANT_SIZES[kind]
        elements, shape, dtype = math.prod(sizes), sizes[::-1] or (1,), _DTYPES.get(kind.name, "u1")
        size = elements * num_bytes // num_weights
        if at + size > len(self._data):
            raise _EndsTooEarlyError
        if dtype == "u1":
            shape = quant_shape_to_byte_shape(shape, kind)
        data = np.asarray(self._data[at : at + size]).view(dtype).reshape(shape)
        return ReaderTensor(
            name, kind, np.array(sizes, np.uint64), elements, size, at, data, ReaderField(at, name)
        )

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        return self._array() if kind == _ARRAY else self._number(_form(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        self._num_items += count
        check_at_most(self._where, "its arrays have {} items", self._num_items, MAX_ITEMS)
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        form = f"<{count}{_form(kind)}"
        start = self._at
        self._skip(struct.calcsize(form))
        return list(struct.unpack_from(form, self._data, start))

    def _text(self, what: str = "a text has {} bytes", limit: int = MAX_TEXT_BYTES) -> str:
        size = self._number("Q")
        check_at_most(self._where, what, size, limit)
        start = self._at
        self._skip(size)
        return str(self._data[start : self._at], "utf-8")

    def _number(self, form: str) -> Any:
        start = self._at
        self._skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._data, start)[0]

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise _EndsTooEarlyError


def _check_version(version: int) -> None:
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS:
        raise ValueError("it is big-endian; run `gguf-convert-endian FILE little` of the package `gguf`")
    older = "; download a newer conversion of the model" if version == 1 else ""
    raise ValueError(f"its version is {version}{older}")


def _tensor_type(name: str, kind: int) -> GGMLQuantizationType:
    if kind in _INTERLEAVED:
        older = _INTERLEAVED[kind]
        raise ValueError(f"tensor `{name}` is of type {older}, which was removed; download {older[:-4]}")
    try:
        return GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"tensor `{name}` is of type {kind}, which llama.cpp does not have") from None


def _form(kind: int) -> str:
    """Return the struct format of a scalar type. Raises ValueError for other types."""
    if kind not in _NUMBERS:
        raise ValueError(f"a value has type {kind}")
    return _NUMBERS[kind]


def read_parts(path: Path) -> list[GgufFile]:
    """Read all split files of the model that `path` belongs to, or the only file.

    Raises BuildError, also if a file's metadata contradicts the number in its name, or if the files together
    lack a tensor or have one twice.
    """
    paths = parts_of(path)
    files = [read_gguf(part) for part in paths]
    for number, (part, file) in enumerate(zip(paths, files, strict=True)):
        keys = {"split.no": 0, "split.count": 1} | file.metadata
        for key in ("split.no", "split.count"):
            if type(keys[key]) is not int:
                raise BuildError(f"{part}: `{key}` is not a whole number; download the model again")
        found = keys["split.no"], max(1, keys["split.count"])
        if found != (number, len(paths)):
            named = f"{number + 1} of {len(paths)}"
            raise BuildError(f"{part}: is part {found[0] + 1} of {found[1]}, not {named} as in its name")
    _check_tensor_count(str(paths[0]), files)
    return files


def _check_tensor_count(where: str, files: list[GgufFile]) -> None:
    names = [tensor.name for file in files for tensor in file.tensors]
    expected = files[0].metadata.get("split.tensors.count", len(names))
    if len(set(names)) != len(names) or expected != len(names):
        raise BuildError(
            f"{where}: its parts have {len(names)} tensors, {len(set(names))} of them different, and "
            f"`split.tensors.count` is {expected!r:.20}; download all parts again"
        )


def parts_of(path: Path) -> list[Path]:
    """Return all split files of the model that `path` belongs to, or only `path` if the model is not split.

    The first file has the model's metadata. Raises BuildError if a file is missing.
    """
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
