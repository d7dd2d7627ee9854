"""Are an artefact's files what was built? Found out while a server loads them and warms up.

What is executed or decides what is read (program, tokenizer) is hashed before that; the parameters, which
take longest, in a thread beside the loading. The other texts may be edited at deployment: what differs
there is logged and applies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shortfin_apps.llm.artifact import artifact as layout
from shortfin_apps.llm.artifact.artifact import Artifact, Manifest, is_covered
from shortfin_apps.llm.artifact.file_record import FileRecord, total_bytes, wrong_files
from shortfin_apps.llm.errors import ArtifactError

logger = logging.getLogger(__name__)

Verify = Literal["none", "size", "hash"]
FIRST = (layout.VMFB, layout.TOKENIZER)
BESIDE = (layout.PARAMETERS,)
EDITABLE = (layout.CONFIG, layout.TOKENIZER_CONFIG, layout.GENERATION_CONFIG)
LEAST_REPORT_BYTES = 1 << 30  # about a second


@contextmanager
def verifying(artifact: Artifact, verify: Verify) -> Iterator[Callable[[], None]]:
    """Compares hashes while the context lasts; what it yields waits for the last of them.

    Entering and the yielded function raise ArtifactError for a file that is not what was built. With
    `none` and `size` nothing is read: sizes are compared when an artefact is opened.
    """
    if verify != "hash" or artifact.manifest is None:
        yield lambda: None
        return
    folder, files = artifact.vmfb.resolve().parent, _covered(artifact, artifact.manifest)
    _refuse(folder, wrong_files(folder, _some(files, FIRST)))
    for name, reason in wrong_files(folder, _some(files, EDITABLE)).items():
        logger.warning("%s %s: it was edited since it was built; what it says now applies", name, reason)
    with _in_background(folder, _some(files, BESIDE)) as wrong:
        yield lambda: _refuse(folder, wrong())


@contextmanager
def _in_background(folder: Path, files: dict[str, FileRecord]) -> Iterator[Callable[[], dict[str, str]]]:
    progress = _Progress(total_bytes(files))
    with ThreadPoolExecutor(1, thread_name_prefix="verify") as pool:
        running = pool.submit(wrong_files, folder, files, progress.advance)
        try:
            yield running.result
        finally:
            progress.is_wanted = False


class _Stopped(Exception):
    """Nobody waits for the result any more."""


class _Progress:
    """Lines in the log, few enough that nobody minds them."""

    def __init__(self, total: int) -> None:
        self.is_wanted = True
        self._total = total
        self._done = 0
        self._step = max(total // 10, LEAST_REPORT_BYTES)

    def advance(self, count: int) -> None:
        if not self.is_wanted:
            raise _Stopped
        before, self._done = self._done, self._done + count
        if self._done == self._total or before // self._step < self._done // self._step:
            percent = 100 * self._done // self._total
            logger.info("hashed %d %% of the parameters' %.1f MB", percent, self._total / 1e6)


def _covered(artifact: Artifact, manifest: Manifest) -> dict[str, FileRecord]:
    """Manifest records of the files that are used: all of them unless they are loose."""
    if not artifact.is_loose:
        return manifest.files
    used = (artifact.vmfb, *artifact.parameters, artifact.tokenizer)
    for path in used:
        if not is_covered(path, artifact.vmfb, manifest):
            logger.info("%s: not verified, as it is not in the manifest beside the VMFB", path)
    names = {path.resolve().name for path in used if is_covered(path, artifact.vmfb, manifest)}
    return _some(manifest.files, tuple(names))


def _some(files: dict[str, FileRecord], names: tuple[str, ...]) -> dict[str, FileRecord]:
    return {name: files[name] for name in names if name in files}


def _refuse(folder: Path, wrong: dict[str, str]) -> None:
    for name, reason in wrong.items():
        raise ArtifactError(
            f"{folder / name}: {reason}; build or copy it again, or serve it as it is with `--verify none`"
        )
