"""The input of a batch: a request in each line, found by its `custom_id`.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon a time"}}

The file is read twice: once whole, to check every line before anything runs, and each line again when it is
its turn, so that of a large file no more is in memory than what is being answered, and the ids.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from shortfin_apps.llm.lone_surrogates import without_lone_surrogates
from shortfin_apps.llm.offline.batch.errors import BatchFileError

BOM = b"\xef\xbb\xbf"  # which Windows' editors write first
MAX_SHOWN = 20  # bad lines
PATH = re.compile(r"/(?!/)[!-~]*")

CheckUrl = Callable[[str], str | None]
"""Returns what is wrong with a line's `url`, or None."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: str
    url: str
    body: msgspec.Raw  # kept byte by byte, but for lone surrogates


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Counts(msgspec.Struct):
    prompt: Any = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None


class BatchLine(NamedTuple):
    """Where a line is: its number from 1, and its bytes in the file."""

    number: int
    custom_id: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a line asks for. `num_sequences` are the places that it takes in the engine."""

    custom_id: str
    url: str
    body: bytes
    num_sequences: int


class BatchInput:
    """A checked input, kept open. `sha256` is of the whole file, in hexadecimal."""

    def __init__(self, path: Path, fd: int, lines: Sequence[BatchLine], sha256: str) -> None:
        self.path = path
        self.lines = lines
        self.sha256 = sha256
        self._fd = fd

    @classmethod
    def open(cls, path: Path, check_url: CheckUrl) -> Self:
        """Raises BatchFileError with every bad line, up to MAX_SHOWN of them."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BatchFileError(f"cannot read {path}: {error.strerror}") from error
        try:
            return cls(path, fd, *_checked(path, fd, check_url))
        except BaseException:
            os.close(fd)
            raise

    def request(self, line: BatchLine) -> BatchRequest:
        """Reads a line again. Raises BatchFileError when the file has changed since it was checked."""
        raw = os.pread(self._fd, line.num_bytes, line.offset)
        try:
            parsed = msgspec.json.decode(without_lone_surrogates(raw), type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            parsed = None
        if parsed is None or parsed.custom_id != line.custom_id:
            raise BatchFileError(f"line {line.number} of {self.path} has changed while the batch runs")
        body = bytes(parsed.body)
        return BatchRequest(parsed.custom_id, parsed.url, body, num_sequences(body))

    def close(self) -> None:
        os.close(self._fd)


def local_url(routes: Sequence[str]) -> CheckUrl:
    """The check where the model is in this process, which has these routes."""

    def check(url: str) -> str | None:
        return None if url in routes else f"`url` is {url!r}, but must be {' or '.join(routes)}"

    return check


def server_url(url: str) -> str | None:
    """The check where a server answers: any path of it, and no other server."""
    return None if PATH.fullmatch(url) else f"`url` is {url!r}, but must be a path such as /v1/completions"


def num_sequences(body: bytes) -> int:
    """How many sequences the engine generates or scores for a request; 1 for one that it will refuse."""
    try:
        counts = msgspec.json.decode(body, type=_Counts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 1
    prompt = counts.prompt
    num_prompts = (
        len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    )
    scores = counts.prompt_logprobs is not None or (counts.echo is True and counts.logprobs is not None)
    choices = [count for count in (counts.n, counts.best_of) if isinstance(count, int) and count > 0]
    return num_prompts * (max(choices, default=1) + scores)


def _checked(path: Path, fd: int, check_url: CheckUrl) -> tuple[list[BatchLine], str]:
    if not S_ISREG(os.fstat(fd).st_mode):
        raise BatchFileError(f"{path} is not a regular file, and a batch that goes on reads it again")
    numbers: dict[str, int] = {}
    lines: list[BatchLine] = []
    bad: list[str] = []
    digest = hashlib.sha256()
    for number, offset, raw in _numbered(path, fd, digest.update):
        try:
            custom_id = _custom_id(raw, check_url)
            if custom_id in numbers:
                raise ValueError(f"`custom_id` {custom_id!r} is that of line {numbers[custom_id]}")
        except ValueError as problem:
            bad.append(f"line {number}: {problem}")
            continue
        numbers[custom_id] = number
        lines.append(BatchLine(number, custom_id, offset, len(raw)))
    if bad:
        raise BatchFileError(_listed(path, bad))
    return lines, digest.hexdigest()


def _numbered(path: Path, fd: int, hashed: Callable[[bytes], object]) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not blank: their numbers, offsets and bytes without the line end."""
    offset = 0
    try:
        with open(fd, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                hashed(raw)
                mark = len(BOM) if number == 1 and raw.startswith(BOM) else 0
                content = raw[mark:].rstrip(b"\r\n")
                if content.strip():
                    yield number, offset + mark, content
                offset += len(raw)
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror}") from error


def _custom_id(raw: bytes, check_url: CheckUrl) -> str:
    """Raises ValueError with what is wrong with the line."""
    try:
        line = msgspec.json.decode(without_lone_surrogates(raw), type=_Line)
        streamed = msgspec.json.decode(line.body, type=_Streamed)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if line.method != "POST":
        raise ValueError(f"`method` is {line.method!r}, but must be POST")
    if (problem := check_url(line.url)) is not None:
        raise ValueError(problem)
    if streamed.stream:
        raise ValueError("`stream` is set, but a batch has whole answers; leave it out")
    return line.custom_id


def _listed(path: Path, bad: Sequence[str]) -> str:
    shown = "".join(f"\n  {problem}" for problem in bad[:MAX_SHOWN])
    rest = f"\n  and {len(bad) - MAX_SHOWN:,} more" if len(bad) > MAX_SHOWN else ""
    lines = "1 line" if len(bad) == 1 else f"{len(bad):,} lines"
    return f"{path} has {lines} that cannot be sent, so nothing was:{shown}{rest}"
