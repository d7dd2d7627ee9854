"""The border between the engine and whatever executes a VMFB.

Everything above this file knows arrays, entry names and nothing else; everything that imports
shortfin or iree.runtime implements these four protocols (`iree.py`, `shortfin.py`).

Threads: one thread, the engine's, calls `submit`, `wait`, `upload` and `download`. `submit` returns
as soon as the work is queued. `wait` blocks that one thread without holding the interpreter lock.
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
    VMFB carries no reflection data for it.
    """

    name: str
    arguments: tuple[TensorType, ...] | None
    results: tuple[TensorType, ...] | None


class Pending(Protocol):
    """An invocation under way."""

    def wait(self) -> Sequence[DeviceBuffer]:
        """Blocks until the results are ready. Raises InvocationError when the device failed."""
        ...


class Program(Protocol):
    """A loaded VMFB with its parameters."""

    @property
    def entries(self) -> Mapping[str, EntrySignature]: ...

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Starts `entry`. Arguments are kept alive until the work is done.

        Successive submissions run in order, so a page table mutated by one is seen by the next.
        """
        ...


class Device(Protocol):
    """An open device. `close` releases everything that was made from it."""

    @property
    def name(self) -> str: ...

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> Program:
        """Loads a VMFB; parameters are memory-mapped, in scope `model`. Raises ArtifactError."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceBuffer:
        """A zero-filled buffer, e.g. a page table slab `[pages, elements]`."""
        ...

    def upload(self, array: Array) -> DeviceBuffer: ...

    def download(self, buffer: DeviceBuffer) -> Array: ...

    def close(self) -> None: ...
