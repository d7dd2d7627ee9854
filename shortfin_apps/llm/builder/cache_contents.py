"""Contents of the user's cache folder, and pruning of entries that are no longer used.

ROOT/served/NAME/          artefacts of `serve SOURCE`
ROOT/build/KIND/KEY/       weights, programs and self-tests that builds reuse (cache.py)
ROOT/build/kernels/CHIP/   compiled Triton kernels (kernels/ahead_of_time/kernel_cache.py)
ROOT/downloads/NAME/       downloads from a package index
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.file_names import MANIFEST
from shortfin_apps.llm.builder.cache import BUILD, DOWNLOADS, ENTRY, KERNELS, SERVED, USE
from shortfin_apps.llm.contract.errors import ArtifactError

UNKNOWN = "?"
DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A folder in the cache, or a kernel's file; `size` is in bytes, `last_use` in seconds since 1970."""

    path: Path
    lock: Path | None  # held while a process writes the folder; files are replaced as a whole
    kind: str
    source: str
    device: str
    size: int
    last_use: float


def contents(root: Path) -> list[Held]:
    """List everything in the cache, most recently used first."""
    held = [*_served(root / SERVED), *_entries(root / BUILD), *_downloads(root / DOWNLOADS)]
    held += _kernels(root / BUILD / KERNELS)
    return sorted(held, key=lambda one: (-one.last_use, one.path))


def to_remove(
    held: Sequence[Held], now: float, older_than_days: float | None, max_size: int | None
) -> list[Held]:
    """Select entries last used more than `older_than_days` ago, and entries beyond `max_size` bytes.

    The total of `max_size` is filled with the most recently used entries first. None: no such limit.
    """
    chosen, kept = [], 0
    for one in sorted(held, key=lambda one: -one.last_use):
        is_old = older_than_days is not None and now - one.last_use > older_than_days * DAY_S
        if is_old or (max_size is not None and kept + one.size > max_size):
            chosen.append(one)
        else:
            kept += one.size
    return chosen


def remove(held: Held) -> bool:
    """Remove the folder or file; return False, and keep the folder, if a build is working on it.

    Servers that have loaded the folder's artefact keep running.
    """
    if held.lock is None:
        held.path.unlink(missing_ok=True)
        return True
    try:
        with FileLock(held.lock, timeout=0):
            shutil.rmtree(held.path)
    except Timeout:
        return False
    return True


def _served(folder: Path) -> Iterator[Held]:
    for manifest in folder.glob(f"[!.]*/{MANIFEST}"):
        path = manifest.parent
        lock = path.with_name(f".{path.name}.lock")
        try:
            found = Manifest.load(manifest)
        except ArtifactError:
            yield _held(path, lock, "model", UNKNOWN, UNKNOWN, path)
        else:
            yield _held(path, lock, "model", found.source.uri, found.device, path)


def _entries(folder: Path) -> Iterator[Held]:
    for entry in folder.glob(f"*/*/{ENTRY}"):
        path = entry.parent
        used = path / USE
        try:
            found = json.loads(used.read_text(encoding="utf-8"))
            source, device = str(found["source"]), str(found["device"])
        except (OSError, ValueError, KeyError, TypeError):  # no use.json, or one of another version
            source, device, used = UNKNOWN, UNKNOWN, entry
        yield _held(path, path.with_name(f"{path.name}.lock"), path.parent.name, source, device, used)


def _kernels(folder: Path) -> Iterator[Held]:
    for path in folder.glob("*/*"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # a build that wrote the file has renamed it
            continue
        yield Held(
            path=path,
            lock=None,
            kind=KERNELS,
            source="Triton",
            device=path.parent.name,
            size=stat.st_size,
            last_use=stat.st_mtime,
        )


def _downloads(folder: Path) -> Iterator[Held]:
    for path in folder.glob("*/"):
        yield _held(path, path / ".lock", "download", path.name, "", path)


def _held(path: Path, lock: Path, kind: str, source: str, device: str, used: Path) -> Held:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    last_use = used.stat().st_mtime
    return Held(path=path, lock=lock, kind=kind, source=source, device=device, size=size, last_use=last_use)
