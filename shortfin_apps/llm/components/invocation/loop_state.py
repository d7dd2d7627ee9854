"""Arguments of decode loops that stay on the device while the same requests decode.

A steady decode uploads nothing: the device reads each row's token from its token table and advances the
positions in place. So the arguments of one step serve the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.abi import SamplingField

Array = npt.NDArray[Any]
Fields = Callable[[Request], "array[int]"]  # of a request, by SamplingField
Call = tuple[Shape, Sequence[DeviceBuffer]]  # a shape, and the arguments of its entry


class LoopState:
    """The arguments of the last decode loop that was launched, except the block tables and the token table.

    `index` counts the launches for the same requests at consecutive positions, from 0.
    """

    def __init__(self, upload: Callable[[Array], DeviceBuffer]) -> None:
        self._upload = upload
        self._rows = 0
        self._requests: list[Request] = []
        self._slots: list[int] = []
        self._starts: list[int] = []  # of the launch with index 0
        self._on_device: dict[str, DeviceBuffer] = {}
        self._from_table: DeviceBuffer | None = None  # `tokens`, if each is in the token table
        self._series: object = None  # of the batch that `_call` served
        self._call: Call | None = None
        self.sampling: Sequence[array[int]] = ()
        self.index = 0

    def call_of_next(self, batch: Batch) -> Call | None:
        """Return the last launch's shape and arguments if they serve this batch, too, and count its launch.

        All tasks of a series advance together, so one of them shows whether the batch is the next.
        """
        if batch.series is not self._series or not _all_in_table(batch.tasks):
            return None
        if batch.tasks[0].start_position != self._starts[0] + self.index + 1:
            return None
        self.index += 1
        return self._call

    def keep_call(self, batch: Batch, call: Call) -> None:
        """Keep the shape and the arguments of a launch, if the next launch can have the same tokens."""
        self._series, self._call = (batch.series if _all_in_table(batch.tasks) else None), call

    def on_device(self, tasks: Sequence[LlmTaskInput], rows: int, fields: Fields) -> dict[str, DeviceBuffer]:
        """Return the arguments for one token of each task, by name, padded to `rows`."""
        self._turn_to(tasks, rows, fields)
        self.index += 1
        if self._starts != [task.start_position - self.index for task in tasks]:
            self._starts, self.index = [task.start_position for task in tasks], 0
            self._on_device["positions"] = self._upload(padded(self._starts, rows, -1))
        return {**self._on_device, "tokens": self._tokens(tasks)}

    def forget(self) -> None:
        """Upload everything again for the next launch: a failed one may not have advanced the positions."""
        self._requests, self._series = [], None

    def _turn_to(self, tasks: Sequence[LlmTaskInput], rows: int, fields: Fields) -> None:
        requests = [task.request for task in tasks]
        slots = [request.slot for request in requests]
        if (requests, slots, rows) == (self._requests, self._slots, self._rows):
            return
        self._requests, self._slots, self._rows = requests, slots, rows
        self._starts, self._from_table = [], None
        self.sampling = [fields(request) for request in requests]
        self._on_device = {
            "slots": self._upload(padded(slots, rows, -1)),
            "sampling": self._upload(padded_sampling(self.sampling, rows)),
        }

    def _tokens(self, tasks: Sequence[LlmTaskInput]) -> DeviceBuffer:
        if not _all_in_table(tasks):
            return self._upload(padded([task.token_ids[0] for task in tasks], self._rows, 0))
        if self._from_table is None:
            self._from_table = self._upload(padded([-1 - slot for slot in self._slots], self._rows, 0))
        return self._from_table


def _all_in_table(tasks: Sequence[LlmTaskInput]) -> bool:
    """Return whether the device has the tokens of all these decodes in its token table."""
    return max([task.token_ids[0] for task in tasks]) < 0


def padded(values: Sequence[int] | Array, rows: int, padding: int) -> Array:
    """Return `values` as an i64 array of `rows` values, with `padding` at its end."""
    array = np.full(rows, padding, np.int64)
    array[: len(values)] = values
    return array


def padded_sampling(fields: Sequence[array[int]], rows: int) -> Array:
    """Return the argument `sampling` [SamplingField, rows], with zeros after the given columns."""
    columns = np.zeros((len(SamplingField), rows), np.int64)
    columns[:, : len(fields)] = np.frombuffer(b"".join(fields), np.int64).reshape(len(fields), -1).T
    return columns


def padding_state(rows: int) -> dict[str, Array]:
    """Return a decode loop's arguments for padding rows alone."""
    return {
        "tokens": np.zeros(rows, np.int64),
        "slots": np.full(rows, -1, np.int64),
        "positions": np.full(rows, -1, np.int64),
        "sampling": np.zeros((len(SamplingField), rows), np.int64),
    }
