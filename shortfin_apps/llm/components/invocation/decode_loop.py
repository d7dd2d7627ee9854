"""Decode loops: decode batches that keep and advance tokens and positions on the device.

Several steps may be queued before the tokens of the first step reach the host. Nothing is uploaded for a step
unless a request has grown into a new page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.abi import SamplingField

Array = npt.NDArray[Any]
Step = Callable[[Sequence[Request], Mapping[str, DeviceBuffer]], Callable[[], Array]]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step in flight: the page it writes for each request, and a function that waits for its token IDs.

    `window_page_ids` is empty if no layer has a sliding window.
    """

    page_ids: tuple[int, ...]
    window_page_ids: tuple[int, ...]
    wait: Callable[[], Array]


class DecodeLoop:
    """Decodes the same requests repeatedly; the requests must keep their order and their leases.

    `state` holds the entry's arguments except the block tables; `step` queues one step on these arguments.
    """

    def __init__(
        self, requests: Sequence[Request], state: Mapping[str, DeviceBuffer], stride: int, step: Step
    ) -> None:
        self.requests = tuple(requests)
        self._has_windows = any(request.window_page_ids is not None for request in requests)
        self._state = state
        self._stride = stride
        self._step = step
        self._queued: deque[_Queued] = deque()
        self._next_position = [request.num_computed for request in self.requests]

    @property
    def num_queued(self) -> int:
        """Number of steps in flight."""
        return len(self._queued)

    def is_at(self, requests: Sequence[Request]) -> bool:
        """Return whether the next queued step would decode the next token of exactly these requests."""
        return tuple(requests) == self.requests and self._next_position == [r.num_computed for r in requests]

    def queue(self) -> None:
        """Queue a step after the steps in flight; every request must have a page for the step's token."""
        pages = self._written([request.page_ids for request in self.requests])
        windows: tuple[int, ...] = ()
        if self._has_windows:
            windows = self._written([request.window_page_ids or () for request in self.requests])
        self._queued.append(_Queued(pages, windows, self._step(self.requests, self._state)))
        self._next_position = [position + 1 for position in self._next_position]

    def _written(self, tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the page of each table that the next step writes."""
        return tuple(
            page_ids[position // self._stride]
            for page_ids, position in zip(tables, self._next_position, strict=True)
        )

    def wait(self) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Wait for the oldest step; return its token IDs, and the page and window page written by request.

        A token ID is -1 if the logits were not finite. Raises InvocationError if the step failed; the step is
        then no longer queued, and the state on the device is undefined.
        """
        step = self._queued.popleft()
        return step.wait()[: len(self.requests)].tolist(), step.page_ids, step.window_page_ids

    def abandon(self) -> tuple[set[int], set[int]]:
        """Wait for all steps in flight, ignoring failures; return the pages and window pages they wrote."""
        page_ids: set[int] = set()
        window_page_ids: set[int] = set()
        while self._queued:
            step = self._queued.popleft()
            page_ids.update(step.page_ids)
            window_page_ids.update(step.window_page_ids)
            with suppress(Exception):  # the caller already knows that something failed
                step.wait()
        return page_ids, window_page_ids


def padded_state(
    rows: int, tasks: Sequence[LlmTaskInput], sampling: Sequence[Sequence[int]]
) -> dict[str, Array]:
    """Return a decode loop's arguments except the block tables, padded to `rows` with position -1."""
    tokens = np.zeros(rows, np.int64)
    positions = np.full(rows, -1, np.int64)
    fields = np.zeros((len(SamplingField), rows), np.int64)
    for row, (task, of_row) in enumerate(zip(tasks, sampling, strict=True)):
        [tokens[row]] = task.token_ids
        positions[row] = task.start_position
        fields[:, row] = of_row
    return {"tokens": tokens, "positions": positions, "sampling": fields}
