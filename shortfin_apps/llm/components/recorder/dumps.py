"""Writes dumps of a flight recorder to a private directory: after faults, and on request."""

from __future__ import annotations

import logging
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from shortfin_apps.llm.components.recorder.dump_file import DumpError, write_dump
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder, Recording
from shortfin_apps.llm.components.recorder.records import Header, LastLaunch

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0  # between two automatic dumps
NUM_KEPT = 10
SUFFIX = ".jsonl.gz"
_PREFIX = "dump-"


class WrittenDump(NamedTuple):
    path: Path
    num_bytes: int


class _Automatic(NamedTuple):
    """An automatic dump: the record number of its last launch, and whether it was written."""

    number: int
    ended: threading.Event


class Dumps:
    """Dumps of one recorder. Thread-safe.

    At most NUM_KEPT files are kept in the directory, and automatic dumps are INTERVAL_S apart.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        directory: Path | None,
        header: Header,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Register the dumps with the recorder. `directory` None means `default_directory`.

        `header` describes the server; `start` runs a function in a separate thread.
        """
        self._recorder = recorder
        self._directory = directory
        self._server = header
        self._clock = clock
        self._start = start or _in_thread
        self._last_s: float | None = None  # when the last automatic dump was started
        self._number = 0
        self._automatic: _Automatic | None = None  # the last automatic dump
        self._lock = threading.Lock()  # guards the state above
        self._writing = threading.Lock()
        recorder.on_fault = self.write_soon

    def check(self) -> None:
        """Create the chosen directory; log a warning if no dump can be written there.

        Otherwise the first fault, which cannot be repeated, would show that.
        """
        if self._directory is None:  # not chosen: it is created with the first dump
            return
        try:
            _make_private(self._directory, is_default=False)
            tempfile.TemporaryFile(dir=self._directory).close()
        except OSError as error:
            logger.warning(
                "flight recorder: %s: no dump can be written there (%s); choose another --dump-dir, or `off`",
                *(self._directory, error.strerror or error),
            )

    def write(self, reason: str) -> WrittenDump:
        """Write a dump now, which may take seconds. Raises DumpError."""
        return self._write(reason, self._recorder.recording())

    def write_last(self, reason: str) -> LastLaunch | None:
        """Write a dump before the process ends; return its last launch.

        If an automatic dump has the same last launch, waits for that one instead. Never raises; errors are
        logged.
        """
        recording = self._recorder.recording()
        last = recording.last_launch(self._recorder.clock())
        with self._lock:
            automatic = self._automatic
        if automatic is not None and last is not None and automatic.number == last.number:
            automatic.ended.wait()
        else:
            self._try(reason, recording)
        return last

    def write_soon(self, reason: str) -> None:
        """Write the current recording in a separate thread; does nothing within INTERVAL_S of the last one.

        Never raises; errors are logged.
        """
        try:
            with self._lock:
                now_s = self._clock()
                if self._last_s is not None and now_s - self._last_s < INTERVAL_S:
                    return
                self._last_s = now_s
            self._write_automatic(reason, self._recorder.recording())
        except Exception as error:
            logger.error("flight recorder: %s, but no dump can be written: %s", reason, error)

    def _write_automatic(self, reason: str, recording: Recording) -> None:
        last, ended = recording.last_launch(self._recorder.clock()), threading.Event()

        def write() -> None:
            try:
                self._try(reason, recording)
            finally:
                ended.set()

        with self._lock:
            self._automatic = _Automatic(0 if last is None else last.number, ended)
        try:
            self._start(write)
        except BaseException:  # no thread is left
            self._automatic = None
            raise

    def _try(self, reason: str, recording: Recording) -> None:
        try:
            self._write(reason, recording)
        except Exception as error:
            logger.error("flight recorder: %s, but no dump can be written: %s", reason, error)

    def _write(self, reason: str, recording: Recording) -> WrittenDump:
        header = self._header(reason, recording)
        with self._writing:
            try:
                directory = self._directory or default_directory()
            except OSError as error:
                raise DumpError(f"dumps need a --dump-dir: {error}") from error
            try:
                _make_private(directory, is_default=self._directory is None)
                path = directory / self._next_name()
                num_bytes = write_dump(path, header, recording)
                _remove_oldest(directory)
            except OSError as error:
                raise DumpError(
                    f"{directory}: a dump cannot be written there ({error.strerror or error}); free some "
                    "space or choose another --dump-dir"
                ) from error
        logger.warning(
            "flight recorder: %s; the last minute's invocations are in %s (%.1f KiB), with the token ids of "
            "users' requests; `shortfin-llm replay-dump %s DIR` runs them again",
            *(reason, path, num_bytes / 1024, path),
        )
        return WrittenDump(path, num_bytes)

    def _next_name(self) -> str:
        with self._lock:
            self._number += 1
            when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            return f"{_PREFIX}{when}-{os.getpid()}-{self._number}{SUFFIX}"

    def _header(self, reason: str, recording: Recording) -> Header:
        now_s = self._recorder.clock()
        return structs.replace(
            self._server,
            reason=reason,
            written_s=now_s,
            last_launch=recording.last_launch(now_s),
            epoch_s=time.time() - now_s,
            versions={**self._server.versions, "python": platform.python_version()},
            cpu=f"{platform.machine()} {platform.processor()}".strip(),
        )


def default_directory() -> Path:
    """Return this user's directory for dumps, in the system's temporary directory."""
    return Path(tempfile.gettempdir()) / f"shortfin-llm-dumps-{os.getuid()}"


def _make_private(directory: Path, *, is_default: bool) -> None:
    """Create the directory if it does not exist.

    Raises DumpError if the default directory, whose name other users know, is not private to this user.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_default:
        return
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise DumpError(f"{directory}: is not a directory of this user's alone; choose a --dump-dir")


def _remove_oldest(directory: Path) -> None:
    with suppress(FileNotFoundError):  # another server may remove files in this directory too
        dumps = sorted(directory.glob(f"{_PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in dumps[:-NUM_KEPT]:
            path.unlink(missing_ok=True)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="flight recorder", daemon=True).start()
