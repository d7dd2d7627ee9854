"""The input of a batch: one request per line, identified by its `custom_id`.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon a time"}}

The file is read twice. The first pass checks all lines before any request is sent. Later, each line is read
again when its request is sent. So memory holds only the position and `custom_id` of each line, and the
requests in progress.
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

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.lone_surrogates import without_lone_surrogates


class BatchFileError(LlmError):
    """A file of a batch cannot be read or written, or does not belong to the batch."""


BOM = b"\xef\xbb\xbf"  # byte order mark, which editors on Windows write at the start of a file
MAX_SHOWN = 20  # bad lines in an error message
PATH = re.compile(r"/(?!/)[!-~]*")

CheckUrl = Callable[[str], str | None]
"""Returns a description of the problem with a line's `url`, or None if there is none."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: str
    url: str
    body: msgspec.Raw  # the bytes in the file, except that lone surrogates are replaced


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
    """Location of a line in the file: its number, counted from 1, its byte offset and its length in bytes."""

    number: int
    custom_id: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request in a line. `num_sequences`: sequences that the engine runs for it (prompts x choices)."""

    custom_id: str
    url: str
    body: bytes
    num_sequences: int


class BatchInput:
    """An input file with checked lines, kept open. `sha256` is the file's hash in hexadecimal."""

    def __init__(self, path: Path, fd: int, lines: Sequence[BatchLine], sha256: str) -> None:
        self.path = path
        self.lines = lines
        self.sha256 = sha256
        self._fd = fd

    @classmethod
    def open(cls, path: Path, check_url: CheckUrl) -> Self:
        """Open a file and check its lines. Raises BatchFileError, which lists up to MAX_SHOWN bad lines."""
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
        """Read the request in a line. Raises BatchFileError if the line has changed since `open`."""
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
    """Return a URL check for a model in this process, which accepts only `routes`."""

    def check(url: str) -> str | None:
        return None if url in routes else f"`url` is {url!r}, but must be {' or '.join(routes)}"

    return check


def server_url(url: str) -> str | None:
    """Check a URL for a server, which accepts any path but no host; return the problem or None."""
    return None if PATH.fullmatch(url) else f"`url` is {url!r}, but must be a path such as /v1/completions"


def num_sequences(body: bytes) -> int:
    """Return how many sequences the engine generates or scores for a request; 1 for an invalid request."""
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
    """Yield number, byte offset and content (without line end) of each line that is not blank.

    `hashed` is called with the bytes of every line. Raises BatchFileError if the file cannot be read.
    """
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
    """Check a line and return its `custom_id`. Raises ValueError with a description of the problem."""
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
