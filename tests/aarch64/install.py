"""Makes a folder with a Python for aarch64 and IREE's runtime, of Debian's packages and wheels.

    python -m tests.aarch64.install FOLDER

Nothing is installed on this machine, and root is not needed. A folder that is complete is left as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

# What the interpreter and the wheels link to, beside the interpreter's own packages.
LIBRARIES = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8")
WHEELS = ("iree-base-runtime", "numpy", "ml_dtypes", "msgpack", "pyelftools")
DONE = "complete"


def install(folder: Path) -> None:
    """Fills `folder`, whole or without the file `complete`."""
    if (folder / DONE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        python = _unpack_packages(folder, Path(work))
    _install_wheels(folder / "site", python)
    (folder / "python").unlink(missing_ok=True)
    (folder / "python").symlink_to(f"usr/bin/python{python}")
    (folder / DONE).touch()


def _unpack_packages(folder: Path, work: Path) -> str:
    """Python's version, that of the Debian release."""
    apt = _apt_for_arm64(work)
    subprocess.run(["apt-get", *apt, "--quiet=2", "update"], check=True)
    depends = _output(["apt-cache", *apt, "depends", "python3-minimal:arm64"])
    found = re.search(r"python(3\.\d+)-minimal", depends)
    assert found, depends
    python = found[1]
    interpreter = [f"python{python}-minimal", f"libpython{python}-minimal", f"libpython{python}-stdlib"]
    names = [f"{name}:arm64" for name in (*LIBRARIES, *interpreter)]
    subprocess.run(["apt-get", *apt, "--quiet=2", "download", *names], cwd=work, check=True)
    for package in work.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    return python


def _apt_for_arm64(work: Path) -> list[str]:
    """Options with which apt knows packages for arm64 and keeps its state in `work`."""
    for part in ("lists/partial", "archives/partial"):
        (work / part).mkdir(parents=True)
    settings = {
        "Dir::State::lists": f"{work}/lists",
        "Dir::Cache": str(work),
        "Debug::NoLocking": "true",
        "APT::Sandbox::User": "",
    }
    native = _output(["dpkg", "--print-architecture"]).strip()
    options = [f"-oAPT::Architectures::={name}" for name in (native, "arm64")]
    return [*options, *(f"-o{name}={value}" for name, value in settings.items())]


def _install_wheels(site: Path, python: str) -> None:
    """Of the versions that this environment has."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    tags = [f"--python-version={python}", "--implementation=cp", *platforms]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--upgrade"]
    wheels = [f"{name}=={version(name)}" for name in WHEELS]
    pip = [sys.executable, "-m", "pip", "install", *options, *tags, f"--target={site}", *wheels]
    subprocess.run(pip, check=True)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    install(Path(sys.argv[1]))
