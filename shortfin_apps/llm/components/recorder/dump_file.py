"""Dumps: files of a flight recorder's records as JSON lines, compressed with gzip."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from shortfin_apps.llm.components.recorder.flight_recorder import Recording
from shortfin_apps.llm.components.recorder.records import (
    FORMAT_VERSION,
    Clear,
    Draw,
    End,
    Header,
    KnownRequest,
    Line,
    Logprobs,
    Loop,
    Recorded,
    Run,
    Step,
    Turn,
)
from shortfin_apps.llm.contract.errors import LlmError

# Larger than any recorder's dump: a larger file is not a dump, or is meant to exhaust memory.
MAX_LINE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 1 << 30

_LEVEL = 1  # gzip's fastest
_DECODER = msgspec.json.Decoder(Line)


class DumpError(LlmError):
    """A dump cannot be written, or a file is not a valid dump."""


class Dump(NamedTuple):
    """A dump read from a file. `is_whole` is False if the file is truncated, so that records are missing."""

    header: Header
    recording: Recording
    is_whole: bool


def write_dump(path: Path, header: Header, recording: Recording) -> int:
    """Write a new file that only its owner may read; return its size in bytes. Raises OSError.

    The dump is written under another name, and renamed to `path` once it is complete.
    """
    recording.settle()
    partial = path.with_name(f"{path.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(descriptor, "wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, filename="") as packed,
        ):
            for line in _lines(header, recording):
                packed.write(line)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _lines(header: Header, recording: Recording) -> Iterator[bytes]:
    encoder, num_lines = msgspec.json.Encoder(), 0
    for part in ((header,), recording.requests, recording.loops, recording.records):
        for line in part:
            num_lines += 1
            yield encoder.encode(line) + b"\n"
    yield encoder.encode(End(num_lines)) + b"\n"


def read_dump(path: Path) -> Dump:
    """Read a dump; from a truncated dump, all complete lines. Raises DumpError if the file is not a dump."""
    try:
        with gzip.open(path, "rb") as file:
            return _read(path, file)
    except OSError as error:  # gzip.BadGzipFile is one
        raise DumpError(f"{path}: cannot be read as a dump ({error.strerror or error})") from None


def _read(path: Path, file: BinaryIO | gzip.GzipFile) -> Dump:
    lines = _decoded(path, file)
    header = next(lines, None)
    if not isinstance(header, Header):
        raise DumpError(f"{path}: does not begin as a dump of `shortfin-llm serve` does")
    requests: list[KnownRequest] = []
    loops: list[Loop] = []
    records: list[Recorded] = []
    is_whole = False
    for line in lines:
        match line:
            case KnownRequest():
                requests.append(line)
            case Loop():
                loops.append(line)
            case Run() | Step() | Draw() | Logprobs() | Clear() | Turn():
                records.append(line)
            case End(num_lines):
                is_whole = num_lines == 1 + len(requests) + len(loops) + len(records)
            case Header():
                raise DumpError(f"{path}: has a second header; it is not one dump")
    recording = Recording(requests, loops, records)
    check(path, header, recording)
    return Dump(header, recording, is_whole)


def _decoded(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[Line]:
    """Yield decoded lines up to the end of the file, or up to the last complete line of a truncated file."""
    total = number = 0
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (EOFError, zlib.error):
            return
        if not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                raise DumpError(f"{path}: line {number + 1} has more than {MAX_LINE_BYTES >> 20} MiB")
            return
        number, total = number + 1, total + len(line)
        if total > MAX_TOTAL_BYTES:
            raise DumpError(f"{path}: has more than {MAX_TOTAL_BYTES >> 20} MiB, which no recorder keeps")
        yield _decode(path, number, line)


def _decode(path: Path, number: int, line: bytes) -> Line:
    try:
        if number == 1:
            _check_version(path, line)
        decoded: Line = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"{path}: line {number} is none of a dump ({error})") from None
    return decoded


class _Version(msgspec.Struct):
    format_version: int


def _check_version(path: Path, line: bytes) -> None:
    version = msgspec.json.decode(line, type=_Version).format_version
    if version != FORMAT_VERSION:
        raise DumpError(
            f"{path}: has format {version}, and this version of shortfin-llm reads {FORMAT_VERSION}; replay "
            "it with the version that wrote it"
        )


def check(path: Path, header: Header, recording: Recording) -> None:
    """Raise DumpError for invalid records, and for records of requests or loops that the dump lacks."""
    requests = {request.number for request in recording.requests}
    loops = {loop.number: loop for loop in recording.loops}
    for record in recording.records:
        if isinstance(record, Turn):
            continue
        named = {each.request for each in record.pages}
        tasks = record.tasks if isinstance(record, Run) else ()
        if isinstance(record, Step):
            if record.loop not in loops:
                raise DumpError(f"{path}: record {record.number} is of a loop that is not there")
            tasks = loops[record.loop].tasks
        named |= {task.request for task in tasks}
        if missing := sorted(named - requests):
            raise DumpError(f"{path}: record {record.number} is of request {missing[0]}, which is not there")
        if isinstance(record, Run | Step) and not all(task.token_ids for task in tasks):
            raise DumpError(f"{path}: record {record.number} has a task without tokens")
    _check_pages(path, header, recording)


def _check_pages(path: Path, header: Header, recording: Recording) -> None:
    """Raise DumpError for page IDs outside the page tables."""
    for request in recording.requests:
        _check_ids(path, request.page_ids, header.num_pages)
        _check_ids(path, request.window_page_ids or (), header.num_window_pages)
    for record in recording.records:
        if isinstance(record, Clear):
            _check_ids(path, record.page_ids, header.num_pages)
            _check_ids(path, record.window_page_ids, header.num_window_pages)
        if isinstance(record, Run):
            _check_ids(path, [task.state_page or 0 for task in record.tasks], header.num_window_pages or 1)
        for each in () if isinstance(record, Turn) else record.pages:
            _check_ids(path, each.page_ids, header.num_window_pages if each.is_window else header.num_pages)


def _check_ids(path: Path, page_ids: object, num_pages: int) -> None:
    assert isinstance(page_ids, list | tuple), "it was decoded as one"
    if page_ids and max(page_ids) >= num_pages:
        raise DumpError(f"{path}: names page {max(page_ids)} of a table of {num_pages}")
