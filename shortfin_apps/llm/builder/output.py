"""The folder that a build makes, or replaces whole.

    PARENT/.NAME.lock           held by the build that works on it
    PARENT/.NAME.partial/       the artefact being put together, and with it whatever is not cached
    PARENT/.NAME.previous/      the artefact it replaces, while the two are being exchanged
    PARENT/NAME/                the artefact

PARENT and NAME are the folder's own, with links resolved, so that builds meet whichever way they came.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shortfin_apps.llm.artifact import artifact as layout
from shortfin_apps.llm.errors import BuildError

_WORKING_NAME = re.compile(r"\..+\.(lock|partial|previous)")


def resolve_output(out: Path) -> Path:
    """The folder that `out` names, if a build may put one there; nothing is written to find out.

    Raises BuildError, OSError when it cannot be looked at.
    """
    try:
        resolved = out.expanduser().resolve()
    except RuntimeError as error:  # a loop of links, or no home
        raise BuildError(f"{out}: {error}; name another folder") from None
    _refuse_irreplaceable(out, resolved)
    _refuse_foreign(resolved)
    _require_writable(resolved)
    return resolved


@contextmanager
def exclusive(out: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lets one build at a time work on `out`; `on_wait` is called when there is another.

    What an interrupted one left is then nobody's, and is cleared up. Parents are made, and go again if
    nothing came of it.
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
            path.unlink(missing_ok=True)  # while it is held: whoever waits then makes a new one
            lock.release()
    finally:
        with suppress(OSError):
            for folder in parents:
                folder.rmdir()


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, gone afterwards."""
    folder = _partial(out)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def exchange(made: Path, out: Path) -> None:
    """Puts `made` in the place of `out`."""
    if out.exists():
        out.rename(_previous(out))
    made.rename(out)
    shutil.rmtree(_previous(out), ignore_errors=True)


def _acquire(lock: FileLock, path: Path, on_wait: Callable[[], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # where no file can be made the library would wait for ever
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        with suppress(FileNotFoundError):  # the other failed, and took the parents with it
            lock.acquire()
            return
        _acquire(lock, path, on_wait)


def _recover(out: Path) -> None:
    """Clears up after a build that was killed, finishing or undoing its exchange."""
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
    if os.path.ismount(resolved):  # the root is one
        raise BuildError(
            f"{out}: is the root of a file system, which cannot be replaced; name a folder in it"
        )
    if Path.cwd().is_relative_to(resolved):
        raise BuildError(
            f"{out}: a build replaces its output, and this is the folder you are in; name a folder in it, or "
            "run this from elsewhere"
        )
    if _WORKING_NAME.fullmatch(resolved.name):
        raise BuildError(f"{out}: builds use such names for what they work on; choose another")


def _refuse_foreign(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise BuildError(f"{out}: exists and is not an artefact but a file; choose another name or remove it")
    names = {path.name for path in out.iterdir()}
    if names and layout.MANIFEST not in names:
        raise BuildError(f"{out}: exists and is not an artefact; choose another folder or remove it")
    if others := sorted(names - {*layout.FILES, layout.MANIFEST}):
        raise BuildError(
            f"{out}: holds `{others[0]}`, which no build made and replacing the folder would remove; move it "
            "or choose another folder"
        )


def _require_writable(out: Path) -> None:
    """Checks the nearest folder that exists, where the others and the working files will be made."""
    above = next(folder for folder in out.parents if folder.exists())
    if not above.is_dir():
        raise BuildError(f"{out}: cannot be made, as {above} is a file; choose another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise BuildError(f"{out}: cannot be made, as {above} cannot be written to; choose another folder")
