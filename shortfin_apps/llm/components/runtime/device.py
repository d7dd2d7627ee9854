"""The border between the engine and whatever executes a VMFB.

Everything above this file knows arrays, entry names and nothing else; everything that imports
shortfin or iree.runtime implements these four protocols (`iree_device.py`, `shortfin_device.py`).

Threads: any thread may call, one at a time; the engine's does. `submit` queues the work and returns.
(The CPU driver allocates an entry's transient buffers in host order: a `submit` behind an unfinished
invocation may wait for that one.) Whatever waits does so without holding the interpreter lock.
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
    """Static knowledge of one argument or result; None stands for a dynamic dimension."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class EntrySignature:
    """One exported function, as far as its reflection data tells.

    `name` has no module prefix and no `$async` suffix. `arguments` and `results` are None when the
    VMFB carries no reflection data for it. With `only_dispatches` it promises that nothing but dispatches
    writes its arguments: no command of a queue fills them or copies into them.
    """

    name: str
    arguments: tuple[TensorType, ...] | None
    results: tuple[TensorType, ...] | None
    only_dispatches: bool = False

    @property
    def tokens_rank(self) -> int | None:
        """The rank of the first argument, the tokens; None where it is not known."""
        return len(self.arguments[0].shape) if self.arguments else None


class Pending(Protocol):
    """An invocation under way."""

    def wait(self) -> Sequence[DeviceBuffer]:
        """Blocks until the results are ready. Raises InvocationError when the invocation failed.

        A failure is reported here, never by `submit`. An invocation that fails on the device takes
        those already queued behind it with it; whatever is submitted after this raised runs again.
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
    ) -> DeviceBuffer:
        """A zero-filled buffer, e.g. a page table slab `[pages, elements]`.

        `stage` is the pipeline stage it belongs to, where stages have devices of their own. A buffer that
        `only_dispatches` write may lie where they read it faster; other commands on it may fail.
        """
        ...

    def upload(self, array: Array) -> DeviceBuffer:
        """A copy of `array`, which the caller may change at once."""
        ...

    def download(self, buffer: DeviceBuffer) -> Array:
        """A copy of a finished result (or of a buffer that nothing in flight writes)."""
        ...

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        """Zeroes rows of an allocated buffer's first dimension; nothing in flight may use it."""
        ...

    def close(self) -> None:
        """Waits for what is under way. Nothing made from the device may be used afterwards."""
        ...
