"""Arguments of decode loops that stay on the device while the same requests decode.

A steady decode uploads nothing: the device reads each row's token from its token table and advances the
positions in place. So the arguments of one step serve the next one, until the block tables change.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.hidden_rows import hidden_rows, is_first
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.contract.abi import GIVEN, NO_HIDDEN, SamplingField

Array = npt.NDArray[Any]
Fields = Callable[[Request], "array[int]"]  # of a request, by SamplingField
Call = tuple[Shape, Sequence[DeviceBuffer]]  # a shape, and the arguments of its entry


class LoopState:
    """The last launch of a decode loop: its shape, and its arguments on the device.

    `index` counts the launches for the same requests at consecutive positions, from 0; `sampling` has the
    fields of each task.
    """

    def __init__(self, upload: Callable[[Array], DeviceBuffer], *, takes_hidden: bool = False) -> None:
        self._upload = upload
        self._takes_hidden = takes_hidden
        self._rows: tuple[object, ...] | None = None  # what `_on_device` is for
        self._on_device: dict[str, DeviceBuffer] = {}
        self._from_table: DeviceBuffer | None = None  # `tokens`, if each is in the token table
        self._series: object = None
        self._call: Call | None = None  # of the last batch of the series
        self._next_start = 0  # of the first task of the batch that may follow
        self.sampling: Sequence[array[int]] = ()
        self.index = 0

    def following(self, batch: Batch) -> Call | None:
        """Return the call for the batch that follows the last one, and count its launch; None for others.

        All tasks of a series advance together, so the first one shows whether the batch is the next.
        """
        if batch.series is not self._series or batch.tasks[0].start_position != self._next_start:
            return None
        assert self._call is not None, "it was kept with the series"
        self._next_start += 1
        self.index += 1
        shape, (_, *others) = self._call
        return shape, [self._tokens(batch.tasks, shape.rows), *others]

    def on_device(
        self,
        tasks: Sequence[LlmTaskInput],
        rows: int,
        fields: Fields,
        slots: Sequence[int] | None = None,
    ) -> dict[str, DeviceBuffer]:
        """Return the arguments for one token of each task, by name, padded to `rows`.

        The drawn tokens are stored in `slots`, one for each task (None: the requests' slots).
        """
        slots = slots or [task.request.slot for task in tasks]
        self.index += 1
        if self._rows != _rows_of(tasks, rows, slots, self.index):
            self.index, self._rows, self._from_table = 0, _rows_of(tasks, rows, slots), None
            self.sampling = [fields(task.request) for task in tasks]
            self._on_device = {
                "slots": self._upload(padded(slots, rows, -1)),
                "positions": self._upload(padded([task.start_position for task in tasks], rows, -1)),
                "sampling": self._upload(padded_sampling(self.sampling, rows)),
            }
            if self._takes_hidden:
                self._on_device["hidden_from"] = self._upload(hidden_rows(tasks, rows)["hidden_from"])
            if self._has_first(tasks):
                self._rows = None
        return {**self._on_device, "tokens": self._tokens(tasks, rows)}

    def keep(self, batch: Batch, call: Call) -> None:
        """Keep the call of a batch for the batches that follow it; `tokens` must be its first argument.

        Not for a model with a draft layer if a task is the first of its lease: the next one is not.
        """
        self._series = None if self._has_first(batch.tasks) else batch.series
        self._call = call
        self._next_start = batch.tasks[0].seq_len

    def forget(self) -> None:
        """Upload everything again for the next launch: a failed one may not have advanced the positions."""
        self._rows = self._series = None

    def _has_first(self, tasks: Sequence[LlmTaskInput]) -> bool:
        return self._takes_hidden and any(is_first(task) for task in tasks)

    def _tokens(self, tasks: Sequence[LlmTaskInput], rows: int) -> DeviceBuffer:
        token_ids = [task.token_ids[0] for task in tasks]
        if max(token_ids) >= 0:  # the host knows some of them
            return self._upload(padded(token_ids, rows, 0))
        if self._from_table is None:
            self._from_table = self._upload(padded(token_ids, rows, 0))
        return self._from_table


def _rows_of(
    tasks: Sequence[LlmTaskInput], rows: int, slots: Sequence[int], num_launches: int = 0
) -> tuple[object, ...]:
    """Return what tells rows apart: their requests, slots and positions before `num_launches`."""
    positions = [task.start_position - num_launches for task in tasks]
    return rows, [task.request for task in tasks], list(slots), positions


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
    """Return the arguments of a decode loop or a draft for padding rows alone."""
    return {
        "tokens": np.zeros(rows, np.int64),
        "slots": np.full(rows, -1, np.int64),
        "positions": np.full(rows, -1, np.int64),
        "checked": np.full(rows, GIVEN, np.int64),
        "sampling": np.zeros((len(SamplingField), rows), np.int64),
        "hidden_from": np.full(rows, NO_HIDDEN, np.int64),
    }
