"""The interface between the engine and the runtimes that execute a VMFB.

Code above this interface knows arrays and entry names, and no runtime. `iree_local.py`, `iree_gpu.py` and
`shortfin_device.py` implement these four protocols.

Threads: any thread may call, one at a time; in the server only the engine's thread does. `submit` queues
work and returns. (On iree.runtime, an entry that allocates transient buffers is started in host order, so a
`submit` behind an unfinished invocation may wait for it.) All waiting releases the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class DeviceBuffer(Protocol):
    """A device-resident array; freed when the last reference goes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of one argument or result; None stands for a dynamic dimension."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class EntrySignature:
    """The signature of an exported function, as far as its reflection data declares it.

    `name` has no module prefix and no `$async` suffix. `arguments` and `results` are None when the
    VMFB carries no reflection data for it. `only_dispatches` means that nothing but dispatches writes its
    arguments: no queue operation fills them or copies into them. With `workspace_bytes`, the caller owns the
    results and a workspace of so many bytes: it passes both behind the arguments, and nothing is returned.
    """

    name: str
    arguments: tuple[TensorType, ...] | None
    results: tuple[TensorType, ...] | None
    only_dispatches: bool = False
    workspace_bytes: int | None = None

    @property
    def tokens_rank(self) -> int | None:
        """The rank of the first argument, the tokens; None where it is not known."""
        return len(self.arguments[0].shape) if self.arguments else None


class Pending(Protocol):
    """An invocation in flight."""

    def wait(self) -> Sequence[DeviceBuffer]:
        """Blocks until the results are ready. Raises InvocationError when the invocation failed.

        Failures are reported here, never by `submit`. When an invocation fails on the device, those already
        queued behind it fail too; submissions after this has raised run normally.
        """
        ...


class Program(Protocol):
    """A loaded VMFB with its parameters."""

    @property
    def entries(self) -> Mapping[str, EntrySignature]: ...

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Starts `entry`. Arguments are kept alive until the work is done.

        Successive submissions run in order, so a page table mutated by one is seen by the next.
        Raises KeyError for a name that is not in `entries`.
        """
        ...


class Device(Protocol):
    """An open device. `close` releases everything that was made from it."""

    @property
    def name(self) -> str: ...

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        """Loads a VMFB; parameters are memory-mapped, in scope `model`. Raises ArtifactError."""
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
        """A zero-filled buffer, e.g. a page table slab `[pages, elements]`.

        `stage` is the pipeline stage it belongs to, if stages have devices of their own. A buffer that
        `only_dispatches` write may be placed where they read it faster; fills and copies on it may fail.
        One that is `on_host` is for few bytes that the host reads often: an invocation that has it as an
        argument brings its contents to the host, so `download`, after its `wait`, asks nothing of the device.
        """
        ...

    def spare_bytes(self, stage: int = 0) -> int | None:
        """Bytes of the stage's memory that may still be taken: those that are free, but for a margin.

        None where that is not known.
        """
        ...

    def upload(self, array: Array) -> DeviceBuffer:
        """Copies `array` to the device; the caller may change it afterwards."""
        ...

    def download(self, buffer: DeviceBuffer) -> Array:
        """Copies a finished result to the host, or any buffer that nothing in flight writes."""
        ...

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        """Zeroes rows of an allocated buffer's first dimension; nothing in flight may use it."""
        ...

    def close(self) -> None:
        """Waits for invocations in flight. Nothing made from the device may be used afterwards."""
        ...
