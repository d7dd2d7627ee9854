"""Builds the emulated GPU's `libamdhip64.so`, and creates environments for processes that use it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock
from platformdirs import user_cache_path

from emulated_gpu.errors import EmulatedGpuError

SOURCES = Path(__file__).parent
LIBRARY = "libamdhip64.so"  # the file name that IREE looks for in IREE_HIP_DYLIB_PATH
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The library starts threads that run its code, so it must never be unloaded.
LINK_FLAGS = ["-shared", "-Wl,-z,nodelete", "-Wl,-z,defs", "-lm", "-lpthread"]


@dataclass(frozen=True)
class EmulatedGpu:
    """The emulated devices of a process. `order`: see `hip/order.c`; `faults`: commands of `hip/faults.c`."""

    chip: str = "gfx942"
    devices: int = 1
    memory_bytes: int = 4 << 30
    order: Literal["random", "late"] = "random"
    seed: int = 0
    faults: tuple[str, ...] = field(default=())
    report: Path | None = None
    control: Path | None = None
    logs_calls: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a process uses these devices.

        IREE reads IREE_HIP_DYLIB_PATH when a process creates its first HIP driver.
        """
        return {
            "IREE_HIP_DYLIB_PATH": str(build_library().parent),
            "EMULATED_GPU_CHIP": self.chip,
            "EMULATED_GPU_DEVICES": str(self.devices),
            "EMULATED_GPU_MEMORY": str(self.memory_bytes),
            "EMULATED_GPU_ORDER": self.order,
            "EMULATED_GPU_SEED": str(self.seed),
            "EMULATED_GPU_FAULTS": ";".join(self.faults),
            "EMULATED_GPU_REPORT": str(self.report or ""),
            "EMULATED_GPU_CONTROL": str(self.control or ""),
            "EMULATED_GPU_LOG": str(int(self.logs_calls)),
            "EMULATED_GPU_PROGRAMS": str(program_cache()),
            "EMULATED_GPU_PYTHON": sys.executable,
        }


def build_library() -> Path:
    """Return the library for the current sources, built now unless the cache has it.

    If EMULATED_GPU_LIBRARY is set, return the library that it names. Raises EmulatedGpuError if there is no
    compiler or compiling fails.
    """
    if given := os.environ.get("EMULATED_GPU_LIBRARY"):
        return Path(given)
    folder = cache_folder() / "libraries" / _key_of_sources(SOURCES)
    library = folder / LIBRARY
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not library.exists():
                _build_into(folder)
    return library


def program_cache() -> Path:
    """Return the folder of translated code objects. Each version of translator and decoder has its own."""
    translator = [*SOURCES.rglob("*.py"), SOURCES / "wave" / "program.h"]
    folder = cache_folder() / "programs" / _hash_of(translator)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Return the user's cache folder, or the one that EMULATED_GPU_CACHE names."""
    given = os.environ.get("EMULATED_GPU_CACHE")
    return Path(given) if given else user_cache_path("emulated-gpu")


def compile_library(sources: Path, folder: Path) -> Path:
    """Compile the C files under `sources` to a library in `folder`; return it. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(Unit.compile, units_of(sources)))
    library = folder / LIBRARY
    _run([_compiler(), *map(str, objects), *LINK_FLAGS, "-o", str(library)])
    return library


@dataclass(frozen=True)
class Unit:
    """A C file to compile. `lanes`: lanes per wave, None if the file does not depend on them."""

    source: Path
    lanes: int | None = None

    def compile(self) -> Path:
        """Return the object file, compiled now unless the cache has it for this file and these headers."""
        headers = [path for part in ("hip", "wave") for path in (self.source.parents[1] / part).glob("*.h")]
        define = [f"-DLANES={self.lanes}"] if self.lanes else []
        key = _hash_of([self.source, *headers], _compilation(define))
        output = cache_folder() / "objects" / f"{key}.o"
        if not output.exists():
            output.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=output.parent) as aside:
                made = Path(aside) / output.name
                _run([_compiler(), *FLAGS, *define, "-c", str(self.source), "-o", str(made)])
                made.rename(output)
        return output


def units_of(sources: Path) -> list[Unit]:
    """List the files to compile. Files with a table of operations are compiled for both wave sizes."""
    units = [Unit(path) for path in sorted((sources / "hip").glob("*.c"))]
    for path in sorted((sources / "wave").glob("*.c")):
        has_operations = "\nOPERATIONS(" in path.read_text()
        units += [Unit(path, 32), Unit(path, 64)] if has_operations else [Unit(path)]
    return units


def _build_into(folder: Path) -> None:
    """Build the library in `folder`. It is compiled elsewhere and moved, so it is never seen incomplete."""
    aside = folder / "objects"
    try:
        compile_library(SOURCES, aside).rename(folder / LIBRARY)
    except subprocess.CalledProcessError as error:
        raise EmulatedGpuError(f"the emulated GPU does not compile:\n{error.stderr}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _compiler() -> str:
    if found := shutil.which(os.environ.get("CC", "gcc")):
        return found
    raise EmulatedGpuError(
        "the emulated GPU needs gcc and the C library's headers (on Debian: apt-get install gcc libc6-dev)"
    )


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _key_of_sources(sources: Path) -> str:
    """Hash what determines the library's machine code: sources, flags and, as of -march=native, the CPU."""
    files = [path for part in ("hip", "wave") for path in (sources / part).glob("*.[ch]")]
    return _hash_of(files, _compilation(LINK_FLAGS))


def _compilation(flags: list[str]) -> str:
    return " ".join([*FLAGS, *flags, platform.machine(), _cpu_flags()])


def _cpu_flags() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _hash_of(files: list[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(files):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]
