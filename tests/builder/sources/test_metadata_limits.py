from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_header import read_gguf
from shortfin_apps.llm.builder.sources.metadata_limits import check_at_most
from shortfin_apps.llm.contract.errors import BuildError

STRING, ARRAY, UINT8 = 8, 9, 0


def test_a_count_above_its_limit_is_named() -> None:
    check_at_most("x", "has {} bytes", 5000, 5000)
    with pytest.raises(BuildError, match="x: has 5,001 bytes, but at most 5,000 are read"):
        check_at_most("x", "has {} bytes", 5001, 5000)


def gguf(path: Path, *, num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + rest)
    return path


def key(kind: int) -> bytes:
    return struct.pack("<Q1sI", 1, b"a", kind)


@pytest.mark.parametrize("read", [read_gguf, GgufSource])
@pytest.mark.parametrize(
    ("num_keys", "rest", "message"),
    [
        (1 << 40, b"", r"it has 1,099,511,627,776 keys, but at most 65,536 are read"),
        (1, key(STRING) + struct.pack("<Q", 1 << 40), "a text has 1,099,511,627,776 bytes, but at most"),
        (
            1,
            key(ARRAY) + struct.pack("<IQ", UINT8, 1 << 40),
            "its arrays have 1,099,511,627,776 items, but at",
        ),
        (1, key(ARRAY) + struct.pack("<IQ", STRING, 1 << 23), "its arrays have 8,388,608 items, but at most"),
    ],
    ids=["keys", "text", "array", "strings"],
)
def test_a_gguf_file_with_too_much_metadata_is_refused_before_it_is_read(
    tmp_path: Path, read: Callable[[Path], object], num_keys: int, rest: bytes, message: str
) -> None:
    with pytest.raises(BuildError, match=f"large.gguf: {message}"):
        read(gguf(tmp_path / "large.gguf", num_keys=num_keys, rest=rest))


@pytest.mark.parametrize(
    ("num_tensors", "rest", "message"),
    [
        (1 << 40, b"", "it has 1,099,511,627,776 tensors, but at most 1,048,576 are read"),
        (1, struct.pack("<Q", 300_000) + b"a" * 300_000, "a tensor's name has 300,000 bytes, but at most"),
        (1, struct.pack("<Q1sI", 1, b"a", 1 << 30), "a tensor has 1,073,741,824 dimensions, but at most"),
    ],
    ids=["tensors", "name", "dimensions"],
)
def test_a_gguf_file_with_odd_tensors_is_refused_before_they_are_read(
    tmp_path: Path, num_tensors: int, rest: bytes, message: str
) -> None:
    with pytest.raises(BuildError, match=f"large.gguf: {message}"):
        GgufSource(gguf(tmp_path / "large.gguf", num_tensors=num_tensors, rest=rest))
