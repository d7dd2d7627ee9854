"""IREE parameter archives (`.irpa`): a streaming writer, and a check to run before IREE's parser.

The format is version 0.0 of IREE's `iree/schemas/parameter_archive.h`, little-endian and packed: a header, a
table of entries, a metadata segment with the entries' names, and a storage segment with the data.
`iree.runtime` can write such files, too, but only with all parameters in memory. Its parser does not check
the offsets in a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"IRPA"
DATA_ALIGNMENT = 64  # in bytes, of each parameter in the storage segment
ENTRY_ALIGNMENT = 16

# magic, major, minor, header_size, next_header_offset, flags, entry_count,
# then (offset, length) of the entry, metadata and storage segments.
_HEADER = struct.Struct("<4sHHQQQQ6Q")
# entry_size, type, flags, name (offset, length), metadata (offset, length), minimum_alignment; and in entries
# of type data, storage (offset, length).
_ENTRY = struct.Struct("<QIQ4QQ2Q")
_COMMON_BYTES = _ENTRY.size - 16  # size of the fields that entries of every type have
_TYPE_DATA = 2


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    name: str
    num_bytes: int


def write_archive(
    path: Path, entries: Sequence[ArchiveEntry], contents: Iterable[bytes | memoryview]
) -> None:
    """Write an archive. `contents` yields the bytes of each entry, in order and in one or more pieces."""
    offsets, storage_length = _place(entries)
    head = _head(entries, offsets, storage_length)
    with path.open("wb") as file:
        file.write(head)
        pieces = iter(contents)
        for entry, offset in zip(entries, offsets, strict=True):
            file.write(bytes(len(head) + offset - file.tell()))
            end = file.tell() + entry.num_bytes
            file.write(next(pieces))
            while file.tell() < end:
                file.write(next(pieces))
            assert file.tell() == end, entry.name
        assert next(pieces, None) is None


def check_archive(path: Path) -> None:
    """Raise ValueError if an offset or a length in the archive leads outside of its segment.

    Files that are not archives of version 0.0 pass, because IREE's parser refuses these.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            return
        _, major, minor, header_size, next_header, _, count, *ranges = _HEADER.unpack(head)
        if (major, minor) != (0, 0):
            return
        is_single = header_size == _HEADER.size and next_header == 0
        _require(is_single, "its header is not that of a single archive")
        for offset, length in zip(ranges[::2], ranges[1::2], strict=True):
            _require(offset + length <= size, "a segment reaches beyond its end")
        file.seek(ranges[0])
        _check_entries(file.read(ranges[1]), count, ranges[3], ranges[5])


def _place(entries: Sequence[ArchiveEntry]) -> tuple[list[int], int]:
    """Return each entry's offset in the storage segment, and the segment's length."""
    offsets, end = [], 0
    for entry in entries:
        offsets.append(_align(end, DATA_ALIGNMENT))
        end = offsets[-1] + entry.num_bytes
    return offsets, end


def _head(entries: Sequence[ArchiveEntry], offsets: Sequence[int], storage_length: int) -> bytes:
    """Return all bytes before the storage segment, padded to the segment's offset."""
    names = [entry.name.encode() for entry in entries]
    table, name_offset = b"", 0
    for entry, name, offset in zip(entries, names, offsets, strict=True):
        table = table.ljust(_align(len(table), ENTRY_ALIGNMENT), b"\0")
        place = (name_offset, len(name), 0, 0, DATA_ALIGNMENT, offset, entry.num_bytes)
        table += _ENTRY.pack(_ENTRY.size, _TYPE_DATA, 0, *place)
        name_offset += len(name)
    table_offset = _align(_HEADER.size, ENTRY_ALIGNMENT)
    names_offset = table_offset + len(table)
    storage_offset = _align(names_offset + name_offset, DATA_ALIGNMENT)
    segments = (table_offset, len(table), names_offset, name_offset, storage_offset, storage_length)
    header = _HEADER.pack(MAGIC, 0, 0, _HEADER.size, 0, 0, len(entries), *segments)
    head = header.ljust(table_offset, b"\0") + table + b"".join(names)
    return head.ljust(storage_offset, b"\0")


def _check_entries(table: bytes, count: int, metadata_length: int, storage_length: int) -> None:
    _require(count <= len(table) // _COMMON_BYTES, "it announces more entries than it has")
    position = 0
    for _ in range(count):
        fields = table[position : position + _ENTRY.size]
        _require(len(fields) >= _COMMON_BYTES, "its entries are cut short")
        entry_size, kind, _, name, name_length, metadata, length, _, storage, stored = _ENTRY.unpack(
            fields.ljust(_ENTRY.size, b"\0")
        )
        _require(_COMMON_BYTES <= entry_size <= len(table) - position, "an entry has a wrong size")
        _require(name + name_length <= metadata_length, "a name reaches beyond the names")
        _require(metadata + length <= metadata_length, "metadata reaches beyond its segment")
        if kind == _TYPE_DATA:
            _require(storage + stored <= storage_length, "a parameter reaches beyond the storage")
        position += _align(entry_size, ENTRY_ALIGNMENT)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
