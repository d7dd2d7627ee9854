"""Results of the slow steps of a build, kept by what they were made from.

ROOT/KIND/KEY/              a finished entry: its files, and entry.json that lists them
ROOT/KIND/KEY.partial/      one being made; whoever makes it holds KEY.lock
ROOT/KIND/KEY.lock
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.build.artifact import FileRecord

ENTRY = "entry.json"
ENVIRONMENT_VARIABLE = "SHORTFIN_LLM_CACHE"
READ_ONLY = 0o444

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
    """A finished entry. Its files are read-only, and are linked to, so never write to them."""

    directory: Path
    files: dict[str, FileRecord]

    def place(self, name: str, target: Path) -> None:
        """Makes `target` the entry's file `name`, by a hard link where the file system allows."""
        source = self.directory / name
        try:
            target.hardlink_to(source)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)


class BuildCache:
    """Entries under one folder, safe to share between processes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get_or_make(self, kind: str, key: str, make: Callable[[Path], None]) -> CacheEntry:
        """The entry of that key; `make` fills a folder with its files when there is none yet."""
        final = self._root / kind / key
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.with_name(f"{key}.lock")):
            return _load(final) or _make(final, make)

    def sweep(self) -> None:
        """Removes what interrupted builds left half-made."""
        for partial in self._root.glob("*/*.partial"):
            try:
                with FileLock(partial.with_suffix(".lock"), timeout=0):
                    shutil.rmtree(partial, ignore_errors=True)
            except Timeout:
                continue  # somebody is making it


def record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(sha256=digest, size_bytes=path.stat().st_size)


def has_size(path: Path, expected: FileRecord) -> bool:
    """A cheap check that finds a file cut short."""
    return path.is_file() and path.stat().st_size == expected.size_bytes


def _load(directory: Path) -> CacheEntry | None:
    try:
        files = _FILES.validate_json((directory / ENTRY).read_bytes())
    except (OSError, ValidationError):
        return None
    if all(has_size(directory / name, expected) for name, expected in files.items()):
        return CacheEntry(directory, files)
    return None


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
