"""The interface between the engine and the runtimes that execute a VMFB.

Code above this interface handles only arrays and entry names. `iree_local.py`, `iree_gpu.py` and
`shortfin_device.py` implement the protocols DeviceBuffer, Pending, Program and Device.

Threads: any thread may call, but callers must make only one call at a time; in the server, only the engine's
thread calls. `submit` queues work and returns. (On iree.runtime, an entry that allocates transient buffers is
started only after earlier invocations, so its `submit` may wait for them.) All waiting releases the GIL.
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
    """An array on a device; its memory is freed with the last reference to the buffer."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of one argument or result; None in `shape` is a dynamic dimension."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class EntrySignature:
    """The signature of an exported function, as far as its reflection data declares it.

    `name` has no module prefix and no `$async` suffix. `arguments` and `results` are None if the VMFB has no
    reflection data for the function. `only_dispatches`: only dispatches write the arguments; no queue
    operation fills them or copies into them. `workspace_bytes`: if not None, callers must pass result buffers
    and a workspace of this size after the arguments, and the entry returns nothing. `compute_units`: if
    not None, the layers are one launch whose workgroups all run at the same time on as many.
    `takes_followers`: an `extend` that computes several rows of one request in layers with a state, too.
    `takes_hidden`: an entry of a model with a draft layer.
    """

    name: str
    arguments: tuple[TensorType, ...] | None
    results: tuple[TensorType, ...] | None
    only_dispatches: bool = False
    workspace_bytes: int | None = None
    compute_units: int | None = None
    takes_followers: bool = False
    takes_hidden: bool = False

    @property
    def is_one_launch(self) -> bool:
        return self.compute_units is not None

    @property
    def tokens_rank(self) -> int | None:
        """The rank of the argument `tokens`, which comes first; None if unknown."""
        return len(self.arguments[0].shape) if self.arguments else None


class Pending(Protocol):
    """An invocation in flight."""

    def results(self) -> Sequence[DeviceBuffer]:
        """Return the results for use in later invocations, which may be submitted before this one is over.

        Waits for the invocation where the runtime cannot tell the results earlier. Raises InvocationError if
        the invocation has failed already.
        """
        ...

    def wait(self) -> Sequence[DeviceBuffer]:
        """Block until the results are ready. Raises InvocationError if the invocation failed.

        Failures are reported here, never by `submit`. If an invocation fails on the device, invocations
        already queued after it fail too. Invocations submitted after this method has raised run normally.
        """
        ...


class PollablePending(Pending, Protocol):
    """An invocation in flight that tells whether it is over."""

    @property
    def done(self) -> bool: ...


class Program(Protocol):
    """A loaded VMFB with its parameters."""

    @property
    def entries(self) -> Mapping[str, EntrySignature]: ...

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Start `entry`. Arguments are kept alive until the invocation is over.

        Invocations run in the order of submission: each reads what previous ones wrote to the page table.
        Raises KeyError for a name that is not in `entries`.
        """
        ...


class Device(Protocol):
    """An open device. `close` releases everything created from it."""

    @property
    def name(self) -> str: ...

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        """Load a VMFB with its parameter files, in scope `model`. Raises ArtifactError."""
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
        """Allocate a zero-filled buffer, e.g. a page table slab `[pages, elements]`.

        `stage`: the buffer's pipeline stage, if each stage has a device. `only_dispatches`: callers promise
        that only dispatches write the buffer; it may then be placed in memory that dispatches read faster,
        where fills and copies may fail. `on_host`: for small buffers that the host reads often. An invocation
        with such an argument also transfers the contents to the host, so a `download` after `wait` needs no
        access to the device.
        """
        ...

    def spare_bytes(self, stage: int = 0) -> int | None:
        """Return how many bytes of the stage's memory may still be allocated: free memory minus a margin.

        Returns None if the device does not report its memory.
        """
        ...

    def upload(self, array: Array) -> DeviceBuffer:
        """Copy `array` to the device; the caller may change it afterwards."""
        ...

    def download(self, buffer: DeviceBuffer) -> Array:
        """Copy a buffer to the host; callers must ensure that no work in flight writes the buffer."""
        ...

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        """Zero rows (first dimension) of an allocated buffer that no work in flight uses."""
        ...

    def close(self) -> None:
        """Wait for invocations in flight. Objects created from the device become unusable."""
        ...
