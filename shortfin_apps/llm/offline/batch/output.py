"""The output files of a batch: reads earlier results, appends new ones, and records which input they answer.

After a crash at any time, the files have complete results, and no request has two. If the process was killed
while appending, the last line is incomplete. If the machine crashed, unsynced data may be missing or replaced
by zeros. When the batch resumes, an incomplete line or zeros at the end are truncated. The state file
`OUTPUT.state.json` is written to disk before the first result. It is kept when the batch is complete, so that
the same command then has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import orjson

from shortfin_apps.llm.offline.batch.requests import BatchFileError, BatchInput
from shortfin_apps.llm.offline.local_model import OK, Answered
from shortfin_apps.llm.serving.http.streaming import json_line


class Finished(NamedTuple):
    """A line of the input that has a result. `is_ok` is True if its status is 200."""

    custom_id: str
    is_ok: bool


class Result(NamedTuple):
    """A line of the output, with its token counts."""

    finished: Finished
    line: bytes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response


def result_of(custom_id: str, answered: Answered) -> Result:
    """Create the output line for an answer with any status."""
    body = _parsed(answered.body)
    response = {"status_code": answered.status, "request_id": answered.request_id, "body": body}
    line = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    return Result(
        Finished(custom_id, answered.status == OK),
        json_line(line) + b"\n",
        _count(usage, "prompt_tokens"),
        _count(details if isinstance(details, dict) else {}, "cached_tokens"),
        _count(usage, "completion_tokens"),
    )


def read_result(line: bytes) -> Finished | None:
    """Parse a line of an output file; return None if the line is not a result."""
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Finished(read.custom_id, read.response.status_code == OK)


def _parsed(body: bytes) -> Any:
    """Parse JSON; return a body that is not JSON, such as a proxy's error page, as a string."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def _count(counts: dict[str, Any], name: str) -> int:
    count = counts.get(name)
    return count if isinstance(count, int) else 0


class ResultFile:
    """An open file of results, locked against other processes while it is open."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._ends_in_part = False  # the last line is incomplete, so nothing may be appended

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and lock the file, creating it if necessary. Raises BatchFileError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise BatchFileError(f"cannot write {path}: {error.strerror}") from error
        try:
            _lock(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def finished(self) -> Iterator[Finished]:
        """Yield the results in the file, then truncate an incomplete line or zeros that a crash has left.

        Raises BatchFileError for any other line that is not a result.
        """
        end = 0
        with self._reader() as file:
            for number, line in enumerate(file, 1):
                found = read_result(line) if line.endswith(b"\n") else None
                if found is None:
                    if line.endswith(b"\n") and b"\0" not in line:
                        raise BatchFileError(
                            f"line {number} of {self.path} is not the result of a request;"
                            " name another file, or overwrite it with --restart"
                        )
                    break
                end += len(line)
                yield found
        self._cut(end)

    def append(self, line: bytes) -> None:
        """Append a line. Raises BatchFileError if writing fails, and in all later calls."""
        if self._ends_in_part:
            raise BatchFileError(f"cannot write {self.path}: it ends in a part of a line")
        before = os.fstat(self._fd).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._ends_in_part = True
            with contextlib.suppress(OSError):  # if this fails, the next run truncates the line
                os.ftruncate(self._fd, before)
            raise self._unwritable(error) from error

    def sync(self) -> None:
        """Flush all appended data to disk. Raises BatchFileError."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._unwritable(error) from error

    def clear(self) -> None:
        self._cut(0)

    def close(self) -> None:
        os.close(self._fd)

    def _cut(self, end: int) -> None:
        try:
            if os.fstat(self._fd).st_size != end:
                os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        except OSError as error:
            raise self._unwritable(error) from error

    def _reader(self) -> BinaryIO:
        os.lseek(self._fd, 0, os.SEEK_SET)
        return open(self._fd, "rb", closefd=False)

    def _unwritable(self, error: OSError) -> BatchFileError:
        return BatchFileError(f"cannot write {self.path}: {error.strerror}")


def _lock(path: Path, fd: int) -> None:
    if not S_ISREG(os.fstat(fd).st_mode):
        raise BatchFileError(f"{path} is not a regular file, which a batch needs to go on after a crash")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchFileError(f"another batch writes {path}; wait for it, or name another file") from None
    except OSError as error:
        raise BatchFileError(f"cannot lock {path}: {error.strerror}") from error


VERSION = 1
SUFFIX = ".state.json"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BatchState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state file's content: which input the results answer, and the file of failed lines.

    `errors` is the path of that file relative to the output's directory; None if there is no such file.
    """

    input_sha256: str
    errors: str | None
    version: int = VERSION


def state_path(output: Path) -> Path:
    return output.parent / f"{output.name}{SUFFIX}"  # with_name would raise for `.` and `/`


def files_beside(output: Path) -> tuple[Path, Path]:
    """Return the two files that `write_state` overwrites: the state file and its temporary file."""
    return state_path(output), output.parent / f"{output.name}{SUFFIX}.new"


def read_state(output: Path) -> BatchState | None:
    """Read the state file of `output`; return None if it is missing or malformed."""
    path = state_path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchState) if path.is_file() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_state(output: Path, state: BatchState) -> None:
    """Replace the state file of `output` atomically and sync it to disk. Raises BatchFileError."""
    path, new = files_beside(output)
    try:
        new.unlink(missing_ok=True)  # a crash may have left it, or it may be a link to another file
        with os.fdopen(os.open(new, _NEW_FILE, 0o666), "wb") as file:
            file.write(msgspec.json.encode(state) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise BatchFileError(f"cannot write {path}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    """Sync the directory's entries to disk, so that new and renamed files survive a machine crash."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


SYNC_AT = 128  # unsynced lines that start a sync; during the sync, as many more may be written
SYNC_S = 1.0


class BatchOutput:
    """The output files of a batch: `results`, and `errors` (if any) for results with another status than 200.

    A killed process loses no result. A machine crash loses at most the last 2 * SYNC_AT results, and only
    results of about the last SYNC_S seconds. `finished`: the results that existed when the files were opened.
    """

    def __init__(self, results: ResultFile, errors: ResultFile | None, finished: dict[str, bool]) -> None:
        self.finished = finished
        self._results = results
        self._errors = errors
        self._num_unsynced = 0
        self._syncing = asyncio.Lock()

    @classmethod
    def open(cls, path: Path, errors: Path | None, batch: BatchInput, *, restart: bool) -> Self:
        """Open the files and read an earlier run's results; with `restart`, empty the files instead.

        Raises BatchFileError for files in use by another run, or with results of another input.
        """
        _check_different([batch.path, path, *([errors] if errors else ())], files_beside(path))
        state = BatchState(batch.sha256, None if errors is None else _seen_from(path, errors))
        with ExitStack() as opened:
            files = []
            for each in [path, *([errors] if errors else ())]:
                files.append(ResultFile.open(each))
                opened.callback(files[-1].close)
            if restart:
                for file in files:
                    file.clear()
            if all(file.is_empty for file in files):
                write_state(path, state)
            else:
                _check_same(path, state)
            finished = _finished(files, batch)
            opened.pop_all()
        return cls(files[0], files[1] if errors else None, finished)

    async def write(self, result: Result) -> None:
        """Append a result to its file, waiting if too many are unsynced. Raises BatchFileError."""
        while self._num_unsynced >= SYNC_AT:
            await self.sync(SYNC_AT)
        file = self._results if self._errors is None or result.finished.is_ok else self._errors
        file.append(result.line)
        self._num_unsynced += 1

    async def sync(self, at: int = 1) -> None:
        """Sync the files to disk if at least `at` lines are not synced. Raises BatchFileError."""
        async with self._syncing:
            if (num_lines := self._num_unsynced) >= at:
                for file in self._files():
                    await asyncio.to_thread(file.sync)
                self._num_unsynced -= num_lines

    async def sync_often(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Sync every SYNC_S seconds until cancelled."""
        while True:
            await sleep(SYNC_S)
            await self.sync()

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[ResultFile]:
        return [self._results, *([self._errors] if self._errors else ())]


def _check_different(paths: Iterable[Path], replaced: Iterable[Path]) -> None:
    """Raise BatchFileError if two of `paths` are the same file, or if one is in `replaced`."""
    seen = {_resolved(path.parent) / path.name for path in replaced}
    for path in paths:
        if (resolved := _resolved(path)) in seen:
            raise BatchFileError(
                f"{path} is named twice; input, output, errors and {SUFFIX} of the output must be different"
            )
        seen.add(resolved)


def _resolved(path: Path) -> Path:
    """Follow symbolic links. Unlike Path.resolve, return a path with a loop of links without an error."""
    return Path(os.path.realpath(path))


def _seen_from(path: Path, errors: Path) -> str:
    """Return the path of `errors` relative to the directory of `path`. Raises BatchFileError unless UTF-8."""
    relative = os.path.relpath(_resolved(errors), _resolved(path).parent)
    try:
        relative.encode()
    except UnicodeEncodeError:
        raise BatchFileError(f"the path {errors} is not UTF-8; name another file for `--errors`") from None
    return relative


def _check_same(path: Path, state: BatchState) -> None:
    """Raise BatchFileError unless the state file next to `path` equals `state`, the state of this batch."""
    before = read_state(path)
    remedy = "name another output, or begin anew with --restart, which empties it"
    if before is None:
        raise BatchFileError(
            f"{path} has content, but no {state_path(path).name} of a batch next to it; {remedy}"
        )
    if before.input_sha256 != state.input_sha256:
        raise BatchFileError(f"{path} has results of another input, or the input has changed since; {remedy}")
    if before.errors != state.errors:
        given = f"--errors {before.errors}" if before.errors else "no --errors"
        raise BatchFileError(f"{path} was begun with {given}; give the same, or begin anew with --restart")
    if before.version != state.version:
        raise BatchFileError(f"{path} was begun by another version of this command; {remedy}")


def _finished(files: Iterable[ResultFile], batch: BatchInput) -> dict[str, bool]:
    """Return, for each finished line's `custom_id`, whether its status is 200. Raises BatchFileError."""
    known = {line.custom_id for line in batch.lines}
    finished: dict[str, bool] = {}
    for file in files:
        for found in file.finished():
            _check_once(found, file.path, known, finished)
            finished[found.custom_id] = found.is_ok
    return finished


def _check_once(found: Finished, path: Path, known: set[str], finished: dict[str, bool]) -> None:
    if found.custom_id in finished or found.custom_id not in known:
        known_id = "a second result for" if found.custom_id in finished else "a result for the unknown"
        raise BatchFileError(
            f"{path} has {known_id} `custom_id` {found.custom_id!r}, so it was changed by hand; name another"
            " output, or begin anew with --restart"
        )
