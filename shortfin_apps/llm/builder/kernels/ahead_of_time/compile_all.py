"""Compile the Triton kernels of a module: from the cache, or in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel_cache import KernelCache
from shortfin_apps.llm.builder.kernels.ahead_of_time.worker_processes import (
    compile_in_workers,
    default_num_workers,
)

# Compiles kernels for an architecture and a chip; returns their code in the same order.
CompileKernels = Callable[[Sequence[Kernel], str, str], Sequence[CodeObject]]


def compile_here(kernels: Sequence[Kernel], architecture: str, chip: str) -> list[CodeObject]:
    """Compile the kernels one after another, in this process."""
    return [compile_kernel(kernel, architecture, chip) for kernel in kernels]


class ParallelCompiler:
    """Compiles kernels in worker processes, except kernels that the cache at `root` has.

    A kernel that a worker did not compile is compiled in this process, which raises its error. `report` gets
    the current activity.
    """

    def __init__(self, root: Path, report: Callable[[str], None], num_workers: int | None = None) -> None:
        self._root = root
        self._report = report
        self._num_workers = num_workers or default_num_workers()

    def __call__(self, kernels: Sequence[Kernel], architecture: str, chip: str) -> list[CodeObject]:
        cache = KernelCache(self._root, chip)
        codes = {kernel.name: cache.load(kernel) for kernel in kernels}
        missing = [kernel for kernel in kernels if codes[kernel.name] is None]

        def keep(kernel: Kernel, code: CodeObject) -> None:
            codes[kernel.name] = code
            cache.store(kernel, code)

        if missing:
            num_cached = len(kernels) - len(missing)
            self._report(f"compiling {len(missing)} kernels for {chip}, {num_cached} from the cache")
        if (num_workers := min(self._num_workers, len(missing))) > 1:
            compile_in_workers(missing, architecture, chip, num_workers, keep)
        for kernel in missing:
            if codes[kernel.name] is None:
                keep(kernel, compile_kernel(kernel, architecture, chip))
        return [code for code in codes.values() if code is not None]
