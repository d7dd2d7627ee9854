"""What must hold of an IREE parameter archive before IREE's parser, which trusts its offsets, may see it.

The layout is version 0 of iree/schemas/parameter_archive.h, little-endian: a header of 88 bytes names three
segments (entries, metadata, storage); an entry begins with its size, its type and two ranges in metadata.
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = b"IRPA"
ENTRY_ALIGNMENT = 16
DATA = 2  # type of an entry whose last two fields are a range in storage

_HEADER = struct.Struct("<4sHHQQQQ6Q")
_ENTRY = struct.Struct("<QIQ4QQ2Q")
_COMMON_BYTES = _ENTRY.size - 16  # of an entry of any type


def check_archive(path: Path) -> None:
    """Raises ValueError when a range of the archive reaches beyond what it is a range of."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            return  # the parser tells what that is
        _, major, minor, header_size, next_header, _, count, *ranges = _HEADER.unpack(head)
        if (major, minor) != (0, 0):
            return
        _require(
            header_size == _HEADER.size and next_header == 0, "its header is not that of a single archive"
        )
        for offset, length in zip(ranges[::2], ranges[1::2], strict=True):
            _require(offset + length <= size, "a segment reaches beyond its end")
        file.seek(ranges[0])
        _check_entries(file.read(ranges[1]), count, ranges[3], ranges[5])


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
        if kind == DATA:
            _require(storage + stored <= storage_length, "a parameter reaches beyond the storage")
        position += -(-entry_size // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
