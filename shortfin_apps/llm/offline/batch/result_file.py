"""A file of results that survives a crash at any time: complete lines, each once.

A process killed while appending leaves a partial line at the end. A machine crash may lose unsynced data and
leave zeros in its place. Both are cut off when the batch resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Self

from shortfin_apps.llm.offline.batch.errors import BatchFileError
from shortfin_apps.llm.offline.batch.results import Finished, read_result


class ResultFile:
    """An open file of results, locked against other processes while it is open."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._ends_in_part = False  # ends in a partial line, which must not be extended

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file, creating it if necessary. Raises BatchFileError."""
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
        """Yield finished lines, then cut off anything left by a crash.

        Raises BatchFileError for a line that is neither a result nor left by a crash.
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
        """Append a line. Raises BatchFileError if it cannot be written in full; so do all later calls."""
        if self._ends_in_part:
            raise BatchFileError(f"cannot write {self.path}: it ends in a part of a line")
        before = os.fstat(self._fd).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._ends_in_part = True
            with contextlib.suppress(OSError):  # then the next run cuts it off
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
