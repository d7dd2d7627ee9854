"""Page-locked host memory for transfers to and from a GPU."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import shortfin.array as sfnp

_SMALLEST_BYTES = 256


class Staging:
    """Host memory for one transfer; `storage` is the used part of `array`."""

    def __init__(self, array: Any, num_bytes: int, stage: int) -> None:
        self.array = array
        self.storage = array.view(slice(0, num_bytes)).storage
        self.stage = stage


class StagingPool:
    """Host arrays of one fiber, kept for later transfers.

    The HIP driver locks pages for every host array that it allocates, and unlocks them when it is freed.
    Sizes are powers of two, so the pool holds less than twice the maximum that was in use at once.
    """

    def __init__(self, fiber: Any) -> None:
        self._fiber = fiber
        self._arrays: list[Any] = []  # all of them, so that keeping the pool alive keeps arrays in use alive
        self._free: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)

    def take(self, num_bytes: int, stage: int) -> Staging:
        """Returns memory for a transfer to or from the device of that pipeline stage."""
        capacity = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free[capacity, stage]
        return Staging(free.pop() if free else self._allocate(capacity, stage), num_bytes, stage)

    def give_back(self, staging: Staging) -> None:
        """Returns the memory to the pool; its transfer must have completed."""
        self._free[staging.array.shape[0], staging.stage].append(staging.array)

    def _allocate(self, capacity: int, stage: int) -> Any:
        array = sfnp.device_array.for_host(self._fiber.device(stage), [capacity], sfnp.uint8)
        self._arrays.append(array)
        return array
