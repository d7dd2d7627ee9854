"""Arrays managed by shortfin, and page-locked host memory for transfers to and from a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import shortfin.array as sfnp

from shortfin_apps.llm.components.runtime.device import Array


class ShortfinBuffer:
    """An array on the device of a pipeline stage, or on the host until an invocation first needs the array.

    `is_page_table`: once zeroed, only invocations write the array. `copy`: host memory that gets the array's
    contents after every invocation, because dispatches cannot write shortfin's host memory. `dispose` is
    called with each array to free, from any thread.
    """

    def __init__(
        self,
        dispose: Callable[[Any], None],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        content: Any,
        *,
        stage: int = 0,
        is_page_table: bool = False,
        copy: Any = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.staged: Array | None = content if isinstance(content, np.ndarray) else None
        self.array: Any = content if self.staged is None else None
        self.stage = stage
        self.copy = copy
        self._is_page_table = is_page_table
        self._dispose = dispose

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def argument(self) -> Any:
        """The array as an argument of an invocation.

        shortfin takes the device from the arguments with a barrier, so they must all be on one device. The
        invocation waits for the timelines that wrote these arguments, and a timeline may have failed. A page
        table needs no barrier: it was zeroed before its first use, and invocations run in order.
        """
        return sfnp.disable_barrier(self.array) if self._is_page_table else self.array

    def __del__(self) -> None:
        for array in (self.array, self.copy):
            if array is not None:
                self._dispose(array)


def write(storage: Any, content: Array) -> None:
    """Copy `content` into a storage that the host can map."""
    with storage.map(discard=True) as mapping:
        memoryview(mapping).cast("B")[:] = content.reshape(-1).view(np.uint8).data


def read(storage: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a copy of the contents of a storage that the host can map."""
    with storage.map(read=True) as mapping:
        return np.frombuffer(mapping, np.uint8).copy().view(dtype).reshape(shape)


_SMALLEST_BYTES = 256


class Staging:
    """Host memory for one transfer; `storage` is the part of `array` that the transfer uses."""

    def __init__(self, array: Any, num_bytes: int, stage: int) -> None:
        self.array = array
        self.storage = array.view(slice(0, num_bytes)).storage
        self.stage = stage


class StagingPool:
    """Host arrays of one shortfin fiber, kept for later transfers.

    Reusing arrays saves time: the HIP driver locks the pages of every host array when it allocates the array,
    and unlocks these pages when it frees the array. Sizes are powers of two, so the pool holds less than
    twice the maximum that was in use at once.
    """

    def __init__(self, fiber: Any) -> None:
        self._fiber = fiber
        self._arrays: list[Any] = []  # also arrays in use, so that the pool keeps them alive
        self._free: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)

    def take(self, num_bytes: int, stage: int) -> Staging:
        """Take memory for a transfer of `num_bytes` to or from the device of a pipeline stage."""
        capacity = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free[capacity, stage]
        return Staging(free.pop() if free else self._allocate(capacity, stage), num_bytes, stage)

    def give_back(self, staging: Staging) -> None:
        """Return the memory to the pool; the transfer must have completed."""
        self._free[staging.array.shape[0], staging.stage].append(staging.array)

    def _allocate(self, capacity: int, stage: int) -> Any:
        array = sfnp.device_array.for_host(self._fiber.device(stage), [capacity], sfnp.uint8)
        self._arrays.append(array)
        return array
