"""Content-addressed cache for the slow steps of a build.

ROOT/KIND/KEY/              a finished entry: its files; entry.json, with their sizes and SHA-256; and
                            use.json, with the source and device of the last use, dated by its modification
                            time
ROOT/KIND/KEY.partial/      an entry being made; the process that makes it holds KEY.lock
ROOT/KIND/KEY.lock
ROOT/kernels/               compiled Triton kernels (kernels/ahead_of_time/kernel_cache.py)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.file_record import FileRecord, record, total_bytes, wrong_files
from shortfin_apps.llm.builder.progress import BuildProgress, QuietProgress

ENTRY = "entry.json"
USE = "use.json"
BUILD, DOWNLOADS, SERVED = "build", "downloads", "served"  # folders in the user's cache
KERNELS = "kernels"
ENVIRONMENT_VARIABLE = "SHORTFIN_LLM_CACHE"
READ_ONLY = 0o444
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
FICLONE = 0x40049409  # Linux, include/uapi/linux/fs.h: share another file's blocks copy-on-write

_FILES = TypeAdapter(dict[str, FileRecord])


def user_cache() -> Path:
    """Return the folder for everything that can be rebuilt or downloaded again."""
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    if override:
        return Path(os.path.expanduser(override))  # noqa: PTH111 (keeps `~unknown`; Path raises)
    return platformdirs.user_cache_path("shortfin-llm")


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Add `folder` to errors of a full disk that name no file, as errors of writes do not."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL and error.filename is None:
            error.filename = str(folder)
        raise


def content_key(*parts: object) -> str:
    """Return a cache key for something made from `parts`: the SHA-256 of their `repr`.

    The `repr` of each part must describe the part completely.
    """
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A finished entry; its files are read-only and belong to the cache.

    `temporary`: `place` moves files instead of copying them, so each file can be placed only once.
    """

    directory: Path
    files: dict[str, FileRecord]
    temporary: bool = False

    def place(self, name: str, target: Path) -> None:
        """Create `target` as an independent copy of the entry's file `name`."""
        source = self.directory / name
        if self.temporary:
            source.rename(target)
        elif not clone(source, target):
            shutil.copyfile(source, target)


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a cache entry by a build: the build's source and device, as the user named them."""

    source: str
    device: str


def clone(source: Path, target: Path) -> bool:
    """Clone `source` to `target` copy-on-write; return False if the file system does not support it."""
    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError:  # another file system, or one without reflinks
            return False
    return True


class BuildCache:
    """A folder of cache entries. Processes can share the folder unless the cache is `temporary`."""

    def __init__(self, root: Path, progress: BuildProgress | None = None, *, temporary: bool = False) -> None:
        self._root = root
        self._temporary = temporary
        self._progress = progress or QuietProgress()

    @property
    def kernels(self) -> Path:
        """The folder of compiled Triton kernels, which programs share."""
        return self._root / KERNELS

    def get_or_make(
        self, kind: str, key: str, make: Callable[[Path], None], use: Use | None = None
    ) -> CacheEntry:
        """Return the entry of `kind` for `key`; make the entry if it is missing or damaged.

        `make(folder)` must write the entry's files to `folder`. `use` is recorded as the entry's last use.
        """
        final = self._root / kind / key
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.with_name(f"{key}.lock")), writing_to(final):
            entry = self._load(kind, final) or _make(final, make)
            if use is not None:
                (final / USE).write_text(json.dumps(asdict(use)), encoding="utf-8")
        return replace(entry, temporary=self._temporary)

    def _load(self, kind: str, directory: Path) -> CacheEntry | None:
        try:
            files = _FILES.validate_json((directory / ENTRY).read_bytes())
        except (OSError, ValidationError):
            return None
        with self._progress.stage("verify", total_bytes(files), f"cached {kind}") as stage:
            wrong = wrong_files(directory, files, stage.advance)
        for name, reason in wrong.items():
            self._progress.note(f"{directory / name}: {reason}; it will be rebuilt")
        return None if wrong else CacheEntry(directory, files)

    def sweep(self) -> None:
        """Remove partial entries left by interrupted builds."""
        for partial in self._root.glob("*/*.partial"):
            try:
                with FileLock(partial.with_suffix(".lock"), timeout=0):
                    shutil.rmtree(partial, ignore_errors=True)
            except Timeout:
                continue  # another process is making this entry


def _make(final: Path, make: Callable[[Path], None]) -> CacheEntry:
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        make(partial)
        files = {path.name: record(path) for path in sorted(partial.iterdir())}
        listing = json.dumps({name: asdict(file) for name, file in files.items()})
        (partial / ENTRY).write_text(listing, encoding="utf-8")
        for path in partial.iterdir():
            path.chmod(READ_ONLY)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return CacheEntry(final, files)
