"""What a batch remembers beside its output: which input it answers, in `OUTPUT.state.json`.

It is on the disk before the first result, and stays, so that a batch that is complete is known as such.
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
    """`errors` is the file of failed lines as seen from the output's directory, None where there is none."""

    input_sha256: str
    errors: str | None
    version: int = VERSION


def state_path(output: Path) -> Path:
    return output.parent / f"{output.name}{SUFFIX}"  # also of `.` and `/`, which have no name


def files_beside(output: Path) -> tuple[Path, Path]:
    """The files that `write_state` replaces."""
    return state_path(output), _new_path(output)


def _new_path(output: Path) -> Path:
    return output.parent / f"{output.name}{SUFFIX}.new"


def read_state(output: Path) -> BatchState | None:
    """None if there is none, or it is not readable as one."""
    path = state_path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchState) if path.is_file() else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_state(output: Path, state: BatchState) -> None:
    """Replaces it in one step, and returns when it is on the disk. Raises BatchFileError."""
    path, new = files_beside(output)
    try:
        new.unlink(missing_ok=True)  # left by a crash, or a link that would have another file overwritten
        with os.fdopen(os.open(new, _NEW_FILE, 0o666), "wb") as file:
            file.write(msgspec.json.encode(state) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise BatchFileError(f"cannot write {path}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    """Has the names in it on the disk, that of the output among them."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
