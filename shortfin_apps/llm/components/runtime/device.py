"""The interface between the engine and the runtimes that execute a VMFB.

Code above this interface handles only arrays and entry names. `iree_local.py`, `iree_gpu.py` and
`shortfin_device.py` implement these four protocols.

Threads: any thread may call, but only one at a time; in the server only the engine's thread does. `submit`
queues work and returns. (On iree.runtime, an entry that allocates transient buffers is started in host order,
so a `submit` after an unfinished invocation may wait for it.) All waiting releases the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
GpuDriver = Literal["hip", "cuda"]

# Values of `--device`.
CPU_NAMES = ("cpu", "local-task", "hostcpu")  # the host CPU
GPU_NAMES: dict[str, GpuDriver] = {"hip": "hip", "amdgpu": "hip", "cuda": "cuda"}  # AMD's and NVIDIA's


class DeviceBuffer(Protocol):
    """A device-resident array, freed with its last reference."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of one argument or result; None is a dynamic dimension."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class EntrySignature:
    """The signature of an exported function, as far as its reflection data declares it.

    `name` has no module prefix and no `$async` suffix. `arguments` and `results` are None if the VMFB has no
    reflection data for the function. `only_dispatches` means that only dispatches write its arguments: no
    queue operation fills them or copies into them. With `workspace_bytes`, the caller owns the results and a
    workspace of that size: it passes both after the arguments, and the entry returns nothing.
    """

    name: str
    arguments: tuple[TensorType, ...] | None
    results: tuple[TensorType, ...] | None
    only_dispatches: bool = False
    workspace_bytes: int | None = None

    @property
    def tokens_rank(self) -> int | None:
        """The rank of the first argument, the tokens, or None if unknown."""
        return len(self.arguments[0].shape) if self.arguments else None


class Pending(Protocol):
    """An invocation in flight."""

    def wait(self) -> Sequence[DeviceBuffer]:
        """Blocks until the results are ready. Raises InvocationError if the invocation failed.

        Failures are reported here, never by `submit`. If an invocation fails on the device, invocations
        already queued after it fail too; submissions after this call has raised run normally.
        """
        ...


class Program(Protocol):
    """A loaded VMFB with its parameters."""

    @property
    def entries(self) -> Mapping[str, EntrySignature]: ...

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Starts `entry`. Arguments are kept alive until the work is done.

        Submissions run in order: each sees the page table writes of the previous ones. Raises KeyError for a
        name that is not in `entries`.
        """
        ...


class Device(Protocol):
    """An open device. `close` releases everything created from it."""

    @property
    def name(self) -> str: ...

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        """Loads a VMFB with memory-mapped parameters, in scope `model`. Raises ArtifactError."""
        ...

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> DeviceBuffer:
        """Allocates a zero-filled buffer, e.g. a page table slab `[pages, elements]`.

        `stage` is the buffer's pipeline stage, if each stage has a device. With `only_dispatches`, only
        dispatches write the buffer: it may be placed where they read it faster, and fills and copies on it
        may fail. `on_host` is for small buffers that the host reads often: an invocation with the buffer as
        an argument also transfers its contents to the host, so `download`, after `wait`, needs no device
        access.
        """
        ...

    def spare_bytes(self, stage: int = 0) -> int | None:
        """Returns how many bytes of the stage's memory may still be allocated: free memory minus a margin.

        Returns None if unknown.
        """
        ...

    def upload(self, array: Array) -> DeviceBuffer:
        """Copies `array` to the device; the caller may change it afterwards."""
        ...

    def download(self, buffer: DeviceBuffer) -> Array:
        """Copies a finished result, or a buffer that no work in flight writes, to the host."""
        ...

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        """Zeroes rows of an allocated buffer's first dimension; no work in flight may use it."""
        ...

    def close(self) -> None:
        """Waits for invocations in flight. Objects created from the device become unusable."""
        ...
