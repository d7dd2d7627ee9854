"""The state file of a batch, `OUTPUT.state.json`: which input the output answers.

It is written to disk before the first result and kept, so that a complete batch is recognised as such.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shortfin_apps.llm.offline.batch.errors import BatchFileError

VERSION = 1
SUFFIX = ".state.json"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BatchState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`errors` is the file of failed lines, relative to the output's directory; None without one."""

    input_sha256: str
    errors: str | None
    version: int = VERSION


def state_path(output: Path) -> Path:
    return output.parent / f"{output.name}{SUFFIX}"  # also of `.` and `/`, which have no name


def files_beside(output: Path) -> tuple[Path, Path]:
    """Return the files that `write_state` replaces."""
    return state_path(output), _new_path(output)


def _new_path(output: Path) -> Path:
    return output.parent / f"{output.name}{SUFFIX}.new"


def read_state(output: Path) -> BatchState | None:
    """Return the state, or None if it is missing or malformed."""
    path = state_path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchState) if path.is_file() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_state(output: Path, state: BatchState) -> None:
    """Replace the state atomically and sync it to disk. Raises BatchFileError."""
    path, new = files_beside(output)
    try:
        new.unlink(missing_ok=True)  # left by a crash, or a link to a file that must not be overwritten
        with os.fdopen(os.open(new, _NEW_FILE, 0o666), "wb") as file:
            file.write(msgspec.json.encode(state) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise BatchFileError(f"cannot write {path}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    """Sync the names in `directory`, including the output's."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
