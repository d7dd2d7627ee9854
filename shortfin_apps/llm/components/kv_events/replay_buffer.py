"""Buffer of the last event batches, for subscribers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

MAX_BATCHES = 10_000  # vLLM's `buffer_steps`
MAX_BYTES = 32 << 20


class ReplayBuffer:
    """Batches by consecutive sequence numbers; drops the oldest, but never the last, however large."""

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def append(self, sequence: int, batch: bytes) -> None:
        self._batches.append((sequence, batch))
        self._num_bytes += len(batch)
        while len(self._batches) > 1 and self._is_over():
            _, dropped = self._batches.popleft()
            self._num_bytes -= len(dropped)

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """The buffered batches from this sequence number on."""
        return ((number, batch) for number, batch in self._batches if number >= sequence)

    def _is_over(self) -> bool:
        return len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes
