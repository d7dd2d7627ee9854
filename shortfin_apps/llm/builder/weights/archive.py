"""Writes IREE parameter archives (`.irpa`) as a stream.

The layout is IREE's `iree/schemas/parameter_archive.h`, version 0.0, little-endian and packed: a
header, a table of entries, their names, then the data. `iree.runtime` can write such files too, but
only with every parameter in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 64  # bytes, of each entry's data
ENTRY_ALIGNMENT = 16

# magic, major, minor, header_size, next_header_offset, flags, entry_count,
# then (offset, length) of the entry, metadata and storage segments.
_HEADER = struct.Struct("<4sHHQQQQ6Q")
# entry_size, type, flags, name (offset, length), metadata (offset, length), minimum_alignment,
# storage (offset, length)
_ENTRY = struct.Struct("<QIQ2Q2QQ2Q")
_TYPE_DATA = 2


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    name: str
    num_bytes: int


def write_archive(
    path: Path, entries: Sequence[ArchiveEntry], contents: Iterable[bytes | memoryview]
) -> None:
    """Writes `entries`; `contents` yields the bytes of each, in the same order."""
    offsets, storage_length = _place(entries)
    head = _head(entries, offsets, storage_length)
    with path.open("wb") as file:
        file.write(head)
        for entry, offset, content in zip(entries, offsets, contents, strict=True):
            assert len(content) == entry.num_bytes, entry.name
            file.write(bytes(len(head) + offset - file.tell()))
            file.write(content)


def _place(entries: Sequence[ArchiveEntry]) -> tuple[list[int], int]:
    """Offsets into the storage segment, and its length."""
    offsets, end = [], 0
    for entry in entries:
        offsets.append(_align(end, ALIGNMENT))
        end = offsets[-1] + entry.num_bytes
    return offsets, end


def _head(entries: Sequence[ArchiveEntry], offsets: Sequence[int], storage_length: int) -> bytes:
    """Everything before the storage segment, padded to where that begins."""
    names = [entry.name.encode() for entry in entries]
    table, name_offset = b"", 0
    for entry, name, offset in zip(entries, names, offsets, strict=True):
        table = table.ljust(_align(len(table), ENTRY_ALIGNMENT), b"\0")
        place = (name_offset, len(name), 0, 0, ALIGNMENT, offset, entry.num_bytes)
        table += _ENTRY.pack(_ENTRY.size, _TYPE_DATA, 0, *place)
        name_offset += len(name)
    table_offset = _align(_HEADER.size, ENTRY_ALIGNMENT)
    names_offset = table_offset + len(table)
    storage_offset = _align(names_offset + name_offset, ALIGNMENT)
    segments = (table_offset, len(table), names_offset, name_offset, storage_offset, storage_length)
    header = _HEADER.pack(b"IRPA", 0, 0, _HEADER.size, 0, 0, len(entries), *segments)
    head = header.ljust(table_offset, b"\0") + table + b"".join(names)
    return head.ljust(storage_offset, b"\0")


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
