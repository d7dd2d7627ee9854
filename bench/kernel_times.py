"""Functions shared by the scripts that time kernels on a GPU, in a folder filled by a tuner."""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from cuda_driver import Cuda, CudaError

GRAPH_S = 2e-3  # approximate duration of one graph
REPEATS = 5

F32 = npt.NDArray[np.float32]


def assemble_all(folder: Path, files: Sequence[str], jobs: int) -> list[bytes]:
    """Assemble gzipped PTX files to machine code; empty for files that the driver rejects."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(partial(_assemble, folder), files, chunksize=4))


_assembler: Cuda | None = None


def _assemble(folder: Path, file: str) -> bytes:
    """Assemble one file. The driver assembles only one at a time per process."""
    global _assembler
    _assembler = _assembler or Cuda()
    try:
        return _assembler.assemble(gzip.decompress((folder / file).read_bytes()))
    except CudaError as error:
        print(f"{file}: {error}", flush=True)
        return b""


def seconds_of(cuda: Cuda, launch: Callable[[], None]) -> float:
    """Return the median time of a launch within a graph of many."""
    single = min(cuda.times_s(lambda: _repeat(launch, 4), 2)) / 4
    launches = int(min(400, max(5, GRAPH_S / single)))
    return statistics.median(cuda.times_s(lambda: _repeat(launch, launches), REPEATS)) / launches


def _repeat(launch: Callable[[], None], times: int) -> None:
    for _ in range(times):
        launch()


def to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)
