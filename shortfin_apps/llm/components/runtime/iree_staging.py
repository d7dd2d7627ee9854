"""Host staging memory for transfers to and from an iree.runtime GPU."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, cast

import iree.runtime as iree
import numpy as np

from shortfin_apps.llm.components.runtime.device import Array
from shortfin_apps.llm.components.runtime.iree_timeline import Fence

_SMALLEST_BYTES = 256
_BYTE = np.dtype(np.uint8)
# HOST_CACHED, because uncached memory is write-combined and slow to read. The flags are converted to int
# because the bindings cannot combine flags before IREE 3.13.
_MEMORY = (
    int(iree.MemoryType.HOST_LOCAL) | int(iree.MemoryType.HOST_CACHED) | int(iree.MemoryType.DEVICE_VISIBLE)
)
_USAGE = int(iree.BufferUsage.DEFAULT) | int(iree.BufferUsage.MAPPING)


class IreeStaging:
    """Page-locked host memory that the device can access; `content` is the memory as `uint8[bytes]`."""

    def __init__(self, allocator: Any, capacity: int) -> None:
        self.buffer = allocator.allocate_buffer(_MEMORY, _USAGE, capacity)
        self.content = cast(Array, self.buffer.map().asarray((capacity,), _BYTE))


class IreeStagingPool:
    """Staging memory of one device, kept for later transfers because locking pages is slow.

    Sizes are powers of two, so the pool holds less than twice the maximum that was in use at once.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._free: defaultdict[int, list[IreeStaging]] = defaultdict(list)
        self._in_use: deque[tuple[Fence, IreeStaging]] = deque()

    def take(self, num_bytes: int) -> IreeStaging:
        capacity = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        self._reclaim()
        free = self._free[capacity]
        return free.pop() if free else IreeStaging(self._allocator, capacity)

    def give_back(self, staging: IreeStaging, used_until: Fence) -> None:
        """Return the memory to the pool; it is reused once `used_until` is reached."""
        self._in_use.append((used_until, staging))

    def _reclaim(self) -> None:
        while self._in_use and self._in_use[0][0].done:
            _, staging = self._in_use.popleft()
            self._free[len(staging.content)].append(staging)
