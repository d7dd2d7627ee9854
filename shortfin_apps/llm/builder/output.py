"""The output folder of a build, created or replaced as a unit.

    PARENT/.NAME.lock           held by the build that works on this folder
    PARENT/.NAME.partial/       the new artefact while it is being assembled; without a build cache, also the
                                weights, the programs and the self-test
    PARENT/.NAME.previous/      the old artefact, while the old and the new one are being swapped
    PARENT/NAME/                the artefact

PARENT and NAME are of the path after resolving symbolic links, so that two builds into one folder share
a lock even if they were given different paths.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.file_names import FILES, MANIFEST, PROGRAM_FILE
from shortfin_apps.llm.builder.cache import DISK_FULL, ENVIRONMENT_VARIABLE, user_cache, writing_to
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError

_WORKING_NAME = re.compile(r"\..+\.(lock|partial|previous)")


def resolve_output(out: Path) -> Path:
    """Return `out` as a resolved path, after checking that a build may replace that folder.

    Writes nothing. Raises BuildError if a build may not replace the folder, OSError if the path cannot be
    inspected.
    """
    try:
        resolved = Path(os.path.expanduser(out)).resolve()  # noqa: PTH111 (keeps `~unknown`; Path raises)
    except RuntimeError as error:  # a loop of symbolic links
        raise BuildError(f"{out}: {error}; name another folder") from None
    _refuse_irreplaceable(out, resolved)
    _refuse_foreign(resolved)
    _require_writable(resolved)
    return resolved


@contextmanager
def exclusive(out: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `out` during the context, so that only one build at a time works on `out`.

    Calls `on_wait` before waiting for another build. Under the lock, removes the leftovers of an interrupted
    build. Creates missing parent folders; at the end, removes the created folders that are still empty.
    """
    parents = [folder for folder in out.parents if not folder.exists()]
    path = out.with_name(f".{out.name}.lock")
    lock = FileLock(path)
    try:
        _acquire(lock, path, on_wait)
        try:
            _refuse_foreign(out)
            _recover(out)
            yield
        finally:
            path.unlink(missing_ok=True)  # before the release: a waiting build must create a new lock file
            lock.release()
    finally:
        with suppress(OSError):
            for folder in parents:
                folder.rmdir()


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Create an empty working folder next to `out`, and remove the folder on exit.

    Callers must hold the lock of `out` (`exclusive`).
    """
    folder = _partial(out)
    try:
        folder.mkdir()
        with writing_to(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_output(made: Path, out: Path) -> None:
    """Move `made` to `out`, replacing the previous artefact if there is one."""
    if out.exists():
        out.rename(_previous(out))
    made.rename(out)
    shutil.rmtree(_previous(out), ignore_errors=True)


def tell_dropped(out: Path, kept: Collection[str], note: Callable[[str], None]) -> None:
    """Name the CPUs and chips, other than `kept`, for which the artefact in `out` has programs, if any."""
    try:
        programs = Manifest.load(out / MANIFEST, lists_files=False).programs
    except ArtifactError:
        return  # there is none, or one that nothing can open
    if dropped := [each.target.description for each in programs if each.target.cpu not in kept]:
        note(f"{out}: replaces the programs for {', '.join(dropped)}")


def file_error(error: OSError, out: Path) -> BuildError:
    """Convert an error of a build's files. A full disk is named by the cache, the output or another file."""
    if error.errno not in DISK_FULL:
        return BuildError(f"{error.filename or out}: {error.strerror or error}")
    cache = user_cache()
    named = error.filename2 or error.filename  # of a copy, the second is the file that was written
    path = None if named is None else Path(named)
    prune = " (`shortfin-llm prune` removes from the cache)"
    if path is None:
        place = f"in {out} or the cache {cache}"
    elif path.is_relative_to(cache):
        place = f"in the cache {cache}"
    else:
        place, prune = f"in {out if path.is_relative_to(_partial(out)) else path}", ""
    return BuildError(f"no space left {place} while building {out}; free some{prune} and run it again")


def _acquire(lock: FileLock, path: Path, on_wait: Callable[[], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Create the file here first: this fails where FileLock would wait forever because it cannot create one.
    # O_NOFOLLOW rejects symbolic links.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        with suppress(FileNotFoundError):  # the other build failed and removed the parent folders
            lock.acquire()
            return
        _acquire(lock, path, on_wait)


def _recover(out: Path) -> None:
    """Remove the leftovers of a killed build.

    Completes the build's swap of artefacts, or undoes the swap if `out` is missing.
    """
    if _previous(out).exists():
        if out.exists():
            shutil.rmtree(_previous(out))
        else:
            _previous(out).rename(out)
    if _partial(out).exists():
        shutil.rmtree(_partial(out))


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _previous(out: Path) -> Path:
    return out.with_name(f".{out.name}.previous")


def _refuse_irreplaceable(out: Path, resolved: Path) -> None:
    if os.path.ismount(resolved):  # true for `/` too
        raise BuildError(
            f"{out}: is the root of a file system, which cannot be replaced; name a folder inside it"
        )
    if Path.cwd().is_relative_to(resolved):
        raise BuildError(
            f"{out}: a build replaces its output folder, and this is the current folder; name a folder "
            "inside it, or run the command from elsewhere"
        )
    if not _is_utf8(resolved):
        raise BuildError(f"{out}: its path is not UTF-8, which libraries that read it need; name another")
    if _WORKING_NAME.fullmatch(resolved.name):
        raise BuildError(f"{out}: names like this are reserved for a build's working files; choose another")


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_foreign(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise BuildError(f"{out}: exists and is a file, not an artefact; choose another name or remove it")
    names = {path.name for path in out.iterdir()}
    if names and MANIFEST not in names:
        raise BuildError(f"{out}: exists and is not an artefact; choose another folder or remove it")
    if others := sorted(names - {*FILES, MANIFEST, *_program_files(out)}):
        raise BuildError(
            f"{out}: contains `{others[0]}`, which is not part of an artefact and would be deleted; move it "
            "or choose another folder"
        )


def _program_files(out: Path) -> set[str]:
    """Return the names of the program files that the artefact's manifest lists.

    Reads manifests of any format version. Empty if the manifest is missing or damaged.
    """
    try:
        listed = json.loads((out / MANIFEST).read_bytes())["files"]
        return {name for name in listed if re.fullmatch(PROGRAM_FILE, name)}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _require_writable(out: Path) -> None:
    """Raise BuildError unless the nearest existing parent of `out` is a writable folder.

    Missing folders and the build's working files will be created there.
    """
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise BuildError(f"{out}: cannot be created, as {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        choose = f"set {ENVIRONMENT_VARIABLE} to" if out.is_relative_to(user_cache()) else "choose"
        raise BuildError(f"{out}: cannot be created, as {parent} is not writable; {choose} another folder")
