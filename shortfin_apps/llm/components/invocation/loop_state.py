"""Arguments of decode loops that stay on the device while the same requests decode.

A steady decode uploads nothing: the device reads each row's token from its token table and advances the
positions in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.abi import SamplingField

Array = npt.NDArray[Any]
Fields = Callable[[Request], Sequence[int]]  # of a request, by SamplingField


class LoopState:
    """The arguments of the last decode loop that was launched, except the block tables and the token table.

    `index` counts the launches for the same requests at consecutive positions, from 0.
    """

    def __init__(self, upload: Callable[[Array], DeviceBuffer]) -> None:
        self._upload = upload
        self._rows = 0
        self._requests: list[Request] = []
        self._slots: list[int] = []
        self._next_starts: list[int] = []
        self._on_device: dict[str, DeviceBuffer] = {}
        self._from_table: DeviceBuffer | None = None  # `tokens`, if each is in the token table
        self.sampling: Sequence[Sequence[int]] = ()
        self.index = 0

    def on_device(self, tasks: Sequence[LlmTaskInput], rows: int, fields: Fields) -> dict[str, DeviceBuffer]:
        """Return the arguments for one token of each task, by name, padded to `rows`."""
        starts = [task.start_position for task in tasks]
        self._turn_to(tasks, rows, fields)
        self.index += 1
        if starts != self._next_starts:
            self._on_device["positions"] = self._upload(padded(starts, rows, -1))
            self.index = 0
        self._next_starts = [start + 1 for start in starts]
        return {**self._on_device, "tokens": self._tokens(tasks)}

    def forget(self) -> None:
        """Upload everything again for the next launch: a failed one may not have advanced the positions."""
        self._requests = []

    def _turn_to(self, tasks: Sequence[LlmTaskInput], rows: int, fields: Fields) -> None:
        requests = [task.request for task in tasks]
        slots = [request.slot for request in requests]
        if (requests, slots, rows) == (self._requests, self._slots, self._rows):
            return
        self._requests, self._slots, self._rows = requests, slots, rows
        self._next_starts, self._from_table = [], None
        self.sampling = [fields(request) for request in requests]
        sampling = np.zeros((len(SamplingField), rows), np.int64)
        sampling[:, : len(tasks)] = np.array(self.sampling, np.int64).T
        self._on_device = {
            "slots": self._upload(padded(slots, rows, -1)),
            "sampling": self._upload(sampling),
        }

    def _tokens(self, tasks: Sequence[LlmTaskInput]) -> DeviceBuffer:
        if not all(task.is_unknown for task in tasks):
            return self._upload(padded([task.token_ids[0] for task in tasks], self._rows, 0))
        if self._from_table is None:
            self._from_table = self._upload(padded([-1 - slot for slot in self._slots], self._rows, 0))
        return self._from_table


def padded(values: Sequence[int] | Array, rows: int, padding: int) -> Array:
    """Return `values` as an i64 array of `rows` values, with `padding` at its end."""
    array = np.full(rows, padding, np.int64)
    array[: len(values)] = values
    return array


def padding_state(rows: int) -> dict[str, Array]:
    """Return a decode loop's arguments for padding rows alone."""
    return {
        "tokens": np.zeros(rows, np.int64),
        "slots": np.full(rows, -1, np.int64),
        "positions": np.full(rows, -1, np.int64),
        "sampling": np.zeros((len(SamplingField), rows), np.int64),
    }
