"""Records the sizes and SHA-256 hashes of files, and compares files with such records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

BLOCK_BYTES = 4 << 20  # hashlib and read release the GIL for each block

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    sha256: str
    size_bytes: int


def record(path: Path) -> FileRecord:
    return FileRecord(sha256=_sha256(path, _ignore, Event()), size_bytes=path.stat().st_size)


def total_bytes(files: Mapping[str, FileRecord]) -> int:
    return sum(expected.size_bytes for expected in files.values())


def wrong_sizes(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Return the problem, by file name, of each file in `folder` that is missing or has another size."""
    return _wrong(files, lambda name: _wrong_size(folder / name, files[name]))


def wrong_files(
    folder: Path, files: Mapping[str, FileRecord], advance: Advance | None = None
) -> dict[str, str]:
    """Return the problem, by file name, of each file in `folder` that differs in size or content.

    Compares sizes first, and contents only if all sizes are right, in parallel threads. The threads call
    `advance` with the number of bytes of each block read. An exception in the caller (such as an interrupt)
    stops the threads after their current block.
    """
    if wrong := wrong_sizes(folder, files):
        return wrong
    stop = Event()
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hash") as pool:
        running = {
            name: pool.submit(_wrong_content, folder / name, expected, advance or _ignore, stop)
            for name, expected in files.items()
        }
        try:
            return _wrong(files, lambda name: running[name].result())
        finally:
            stop.set()


def _wrong(files: Mapping[str, FileRecord], check: Callable[[str], str | None]) -> dict[str, str]:
    found = {name: check(name) for name in files}
    return {name: reason for name, reason in found.items() if reason is not None}


def _wrong_size(path: Path, expected: FileRecord) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size == expected.size_bytes:
        return None
    return f"has {size} bytes instead of {expected.size_bytes}"


def _wrong_content(path: Path, expected: FileRecord, advance: Advance, stop: Event) -> str | None:
    try:
        digest = _sha256(path, advance, stop)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest == expected.sha256 else "has another content (its SHA-256 differs)"


def _sha256(path: Path, advance: Advance, stop: Event) -> str:
    """Return a file's SHA-256. Uses `read`, because in a memory mapping a bad sector raises SIGBUS."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (count := file.readinto(block)):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()


def _ignore(count: int) -> None:
    pass
