"""Checks the set-up's requirements on this machine before the first long step.

Each check returns sentences that name the missing program and how to install it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.cache import SetUpError

LOOK_LIMIT_S = 60  # for commands that take a second
LDCONFIG = Path("/sbin/ldconfig")
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of one server: missing ones as sentences, and the disk space still needed."""

    missing: tuple[str, ...] = ()
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Language:
    """A language: how CMake finds its compiler, and a program to test headers and libraries."""

    variable: str
    compilers: tuple[str, ...]
    option: str
    program: str
    package: str


C = Language("CC", ("cc", "gcc", "clang"), "c", "#include <math.h>\nint main(void) { return 0; }\n", "gcc")
CXX = Language(
    "CXX",
    ("c++", "g++", "clang++"),
    "c++",
    "#include <thread>\nint main() { std::thread([] {}).join(); }\n",
    "g++",
)


def check(root: Path, needs: Iterable[Needs]) -> None:
    """Raise SetUpError listing everything that is missing; `root` is the cache."""
    several = list(needs)
    missing = [sentence for each in several for sentence in each.missing]
    missing += disk(root, sum(each.disk_bytes for each in several))
    if missing:
        raise SetUpError(
            "\n  ".join(["nothing was set up yet, as this is missing:", *dict.fromkeys(missing)])
        )


def disk(root: Path, needed_bytes: int) -> list[str]:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes >= needed_bytes:
        return []
    needed, free = f"{needed_bytes / 1e9:.1f} GB", f"{free_bytes / 1e9:.1f} GB"
    return [f"room: {root} needs {needed}, but {free} are free; make room, or give another --cache"]


def program(name: str, package: str) -> list[str]:
    if shutil.which(name) is not None:
        return []
    return [f"the program {name}; on Debian: apt-get install {package}"]


def compiler(language: Language) -> list[str]:
    """Compile and link a program, as a compiler without its libraries would fail later."""
    found = os.environ.get(language.variable) or next(filter(shutil.which, language.compilers), None)
    advice = f"on Debian: apt-get install {language.package}"
    name = language.option.upper()
    if found is None:
        return [f"a {name} compiler; {advice}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *shlex.split(found),
            "-x",
            language.option,
            "-",
            "-pthread",
            "-o",
            str(Path(folder, "out")),
        ]
        answer = _run(command, language.program)
    if answer.returncode == 0:
        return []
    return [f"a {name} compiler that works: {found} says {_first_line(answer)!r}; {advice}"]


def shared_library(name: str, package: str) -> list[str]:
    if find_library(name) is not None:
        return []
    return [f"the library {name}; on Debian: apt-get install {package}"]


def find_library(name: str) -> str | None:
    """Return the library's path in the dynamic linker's cache."""
    for line in _run([str(LDCONFIG), "-p"]).stdout.splitlines():
        if line.strip().startswith(name):
            return line.rpartition("=> ")[2]
    return None


def interpreter(python: str) -> list[str]:
    """Check the interpreter for venv, which is a separate package on Debian."""
    answer = _run([python, "-c", "import ensurepip, venv"])
    if answer.returncode == 0:
        return []
    why = _first_line(answer)
    return [f"an interpreter that makes virtual environments: {python} says {why!r}; on Debian: apt-get "
            "install python3-venv"]  # fmt: skip


def python_headers(python: str) -> list[str]:
    code = (
        "import pathlib, sysconfig; print(pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists())"
    )
    if _run([python, "-c", code]).stdout.strip() == "True":
        return []
    return [f"Python.h of {python}; on Debian: apt-get install python3-dev"]


def zen_cpu() -> list[str]:
    """Check for a CPU on which vLLM uses zentorch: on others it only logs that it does not."""
    text = CPU_INFO.read_text(encoding="utf-8")
    if "AuthenticAMD" in text and "avx512" in text:
        return []
    return ["a CPU by AMD with AVX-512, which vllm-zen is for; leave it out"]


def wheel(python: str, name: str, version: str) -> list[str]:
    """Check that pip, as configured, finds the release for the interpreter; nothing is downloaded."""
    answer = _run([sys.executable, "-m", "pip", "--python", python, "index", "versions", name])
    versions = answer.stdout.replace(",", " ").replace("(", " ").replace(")", " ").split()
    if version in versions:
        return []
    return [f"{name} {version}, which pip does not find for {python}; configure an index or a folder of "
            "wheels that has it, or give another --vllm-python"]  # fmt: skip


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program. Failing to start or to end counts as failed."""
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=LOOK_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _first_line(answer: subprocess.CompletedProcess[str]) -> str:
    return next(iter(answer.stderr.strip().splitlines()), f"exit {answer.returncode}")
