"""Verification: compares the hashes of an artefact's files with its manifest while a server loads.

Program, tokenizer and self-test are hashed before anything is loaded. The parameters, which take longest, are
hashed in a thread while the model loads and warms up. The remaining files may be edited at deployment: a
difference is logged, and the edited file is used (compiled_config.py defines which fields of the config
may differ). Programs and parameters for other devices are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from shortfin_apps.llm.artifact.artifact import Artifact, Manifest, is_covered
from shortfin_apps.llm.artifact.file_names import (
    GENERATION_CONFIG,
    SELF_TEST,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from shortfin_apps.llm.artifact.file_record import FileRecord, total_bytes, wrong_files
from shortfin_apps.llm.contract.errors import ArtifactError

logger = logging.getLogger(__name__)

Verify = Literal["none", "size", "hash"]
EDITABLE = (TOKENIZER_CONFIG, GENERATION_CONFIG)  # and the config
MIN_REPORT_BYTES = 1 << 30  # about a second


@contextmanager
def verifying(artifact: Artifact, verify: Verify) -> Iterator[Callable[[], None]]:
    """Compare hashes while the context is open; the yielded function waits until all are compared.

    Entering the context and calling the function raise ArtifactError for a file that differs from the build.
    If `verify` is not "hash", no file is read here; `Artifact.open` compares sizes.
    """
    if verify != "hash" or artifact.manifest is None:
        yield lambda: None
        return
    folder, files = artifact.vmfb.resolve().parent, _covered(artifact, artifact.manifest)
    _refuse(folder, wrong_files(folder, _some(files, (artifact.vmfb.resolve().name, TOKENIZER, SELF_TEST))))
    for name, reason in wrong_files(folder, _some(files, (artifact.config_file.name, *EDITABLE))).items():
        logger.warning("%s %s: it was edited since the build; the edited file is used", name, reason)
    parameters = tuple(path.resolve().name for path in artifact.parameters)
    with _in_background(folder, _some(files, parameters)) as wrong:
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
    """Stops the hashing, because loading has failed and the result is no longer needed."""


class _Progress:
    """Logs the progress of hashing after each tenth of the total, but at least MIN_REPORT_BYTES apart."""

    def __init__(self, total: int) -> None:
        self.is_wanted = True
        self._total = total
        self._done = 0
        self._step = max(total // 10, MIN_REPORT_BYTES)

    def advance(self, count: int) -> None:
        if not self.is_wanted:
            raise _Stopped
        before, self._done = self._done, self._done + count
        if self._done == self._total or before // self._step < self._done // self._step:
            percent = 100 * self._done // self._total
            logger.info("hashed %d %% of the parameters' %.1f MB", percent, self._total / 1e6)


def _covered(artifact: Artifact, manifest: Manifest) -> dict[str, FileRecord]:
    """Return the manifest's records of the files in use. Logs and omits files that the manifest lacks."""
    if not artifact.is_loose:
        return manifest.files
    used = (artifact.vmfb, *artifact.parameters, artifact.tokenizer)
    for path in used:
        if not is_covered(path, artifact.vmfb, manifest):
            logger.info("%s: not verified, as it is not in the VMFB's manifest", path)
    names = {path.resolve().name for path in used if is_covered(path, artifact.vmfb, manifest)}
    return _some(manifest.files, tuple(names))


def _some(files: dict[str, FileRecord], names: tuple[str, ...]) -> dict[str, FileRecord]:
    return {name: files[name] for name in names if name in files}


def _refuse(folder: Path, wrong: dict[str, str]) -> None:
    for name, reason in wrong.items():
        raise ArtifactError(
            f"{folder / name}: {reason}; build or copy it again, or skip this check with `--verify none`"
        )
