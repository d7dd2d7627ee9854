"""The output files of a batch: existing results, and appending new ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from shortfin_apps.llm.offline.batch.errors import BatchFileError
from shortfin_apps.llm.offline.batch.requests import BatchInput
from shortfin_apps.llm.offline.batch.result_file import ResultFile
from shortfin_apps.llm.offline.batch.results import Finished, Result
from shortfin_apps.llm.offline.batch.state import (
    SUFFIX,
    BatchState,
    files_beside,
    read_state,
    state_path,
    write_state,
)

SYNC_AT = 128  # lines; as many more may be written while they are synced
SYNC_S = 1.0


class BatchOutput:
    """Accepts results in any order. If there is an `errors` file, failed lines are written to it.

    A machine crash can lose at most 2 * SYNC_AT lines or about SYNC_S seconds of results; a killed process
    loses none. `finished` are the results that existed when the files were opened.
    """

    def __init__(self, results: ResultFile, errors: ResultFile | None, finished: dict[str, bool]) -> None:
        self.finished = finished
        self._results = results
        self._errors = errors
        self._num_unsynced = 0
        self._syncing = asyncio.Lock()

    @classmethod
    def open(cls, path: Path, errors: Path | None, batch: BatchInput, *, restart: bool) -> Self:
        """Open the files and read an earlier run's results; `restart` empties them instead.

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
        """Append a line. Raises BatchFileError."""
        while self._num_unsynced >= SYNC_AT:
            await self.sync(SYNC_AT)
        file = self._results if self._errors is None or result.finished.is_ok else self._errors
        file.append(result.line)
        self._num_unsynced += 1

    async def sync(self, at: int = 1) -> None:
        """Write results to disk if at least `at` lines are not synced.

        Raises BatchFileError.
        """
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
    """Raise BatchFileError for a file that is named twice, or that is in `replaced`."""
    seen = {_resolved(path.parent) / path.name for path in replaced}
    for path in paths:
        if (resolved := _resolved(path)) in seen:
            raise BatchFileError(
                f"{path} is named twice; input, output, errors and {SUFFIX} of the output must be different"
            )
        seen.add(resolved)


def _resolved(path: Path) -> Path:
    """Follow links. A loop of links stays unchanged; Path.resolve raises RuntimeError for it."""
    return Path(os.path.realpath(path))


def _seen_from(path: Path, errors: Path) -> str:
    """Return the errors file's path relative to the output. Raises BatchFileError unless it is UTF-8."""
    relative = os.path.relpath(_resolved(errors), _resolved(path).parent)
    try:
        relative.encode()
    except UnicodeEncodeError:
        raise BatchFileError(f"the path {errors} is not UTF-8; name another file for `--errors`") from None
    return relative


def _check_same(path: Path, state: BatchState) -> None:
    """Raise BatchFileError unless the results in `path` belong to this batch."""
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
    """Return whether each finished line succeeded, by `custom_id`."""
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
