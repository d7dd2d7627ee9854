"""Results of the slow steps of a build, kept by what they were made from.

ROOT/KIND/KEY/              a finished entry: its files, and entry.json that lists them
ROOT/KIND/KEY.partial/      one being made; whoever makes it holds KEY.lock
ROOT/KIND/KEY.lock
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.file_record import FileRecord, record, total_bytes, wrong_files
from shortfin_apps.llm.builder.progress import BuildProgress, QuietProgress

ENTRY = "entry.json"
ENVIRONMENT_VARIABLE = "SHORTFIN_LLM_CACHE"
READ_ONLY = 0o444
FICLONE = 0x40049409  # Linux, include/uapi/linux/fs.h: share another file's blocks until either is written to

_FILES = TypeAdapter(dict[str, FileRecord])


def user_cache() -> Path:
    """The folder for everything that can be made or fetched again."""
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(override).expanduser() if override else platformdirs.user_cache_path("shortfin-llm")


def content_key(*parts: object) -> str:
    """A name for what is made from `parts`, which must have a `repr` that says all of them."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A finished entry; its files are read-only, and nobody's but the cache's.

    Those of a `temporary` cache are handed out themselves, once.
    """

    directory: Path
    files: dict[str, FileRecord]
    temporary: bool = False

    def place(self, name: str, target: Path) -> None:
        """Makes `target` a file of its own with the content of the entry's `name`."""
        source = self.directory / name
        if self.temporary:
            source.rename(target)
        elif not clone(source, target):
            shutil.copyfile(source, target)


def clone(source: Path, target: Path) -> bool:
    """Makes `target` share the blocks of `source`, copied when written to; False where that cannot be."""
    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError:  # another file system, or one that does not share blocks
            return False
    return True


class BuildCache:
    """Entries under one folder, safe to share between processes unless it is `temporary`."""

    def __init__(self, root: Path, progress: BuildProgress | None = None, *, temporary: bool = False) -> None:
        self._root = root
        self._temporary = temporary
        self._progress = progress or QuietProgress()

    def get_or_make(self, kind: str, key: str, make: Callable[[Path], None]) -> CacheEntry:
        """The entry of that key; `make` fills a folder with its files when there is no whole one yet."""
        final = self._root / kind / key
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.with_name(f"{key}.lock")):
            entry = self._load(kind, final) or _make(final, make)
        return replace(entry, temporary=self._temporary)

    def _load(self, kind: str, directory: Path) -> CacheEntry | None:
        try:
            files = _FILES.validate_json((directory / ENTRY).read_bytes())
        except (OSError, ValidationError):
            return None
        with self._progress.stage("verify", total_bytes(files)) as stage:
            stage.say(f"cached {kind}")
            wrong = wrong_files(directory, files, stage.advance)
        for name, reason in wrong.items():
            self._progress.note(f"{directory / name}: {reason}; it is made again")
        return None if wrong else CacheEntry(directory, files)

    def sweep(self) -> None:
        """Removes what interrupted builds left half-made."""
        for partial in self._root.glob("*/*.partial"):
            try:
                with FileLock(partial.with_suffix(".lock"), timeout=0):
                    shutil.rmtree(partial, ignore_errors=True)
            except Timeout:
                continue  # somebody is making it


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
