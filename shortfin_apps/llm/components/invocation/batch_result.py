"""The results of a batch: candidates on the host, and logits, which are fetched when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.recorder.records import Run
from shortfin_apps.llm.components.recorder.row_checks import Fetched, logits_sum
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.sampling.candidates import Candidates

Array = npt.NDArray[Any]


class BatchResult:
    """Results of one batch, one row per task; logits are copied to the host on first use.

    `on_device` has all results by name, valid until the next batch runs.
    """

    def __init__(
        self,
        batch: Batch,
        values: Array | None,
        indices: Array | None,
        fetch_logits: Callable[[], Array] | None,
        on_device: Mapping[str, DeviceBuffer] | None = None,
    ) -> None:
        self.on_device = on_device or {}
        self._tasks = batch.tasks
        self._values = values
        self._indices = indices
        self._fetch_logits = fetch_logits
        self._logits: Array | None = None
        self._record: Run | None = None
        self._holds_nan = values is not None and bool(np.isnan(values.min(initial=0)))

    def row(self, index: int, with_logits: bool) -> Candidates:
        """Return row `index`'s candidates; `with_logits` adds the logits `[V]`, which the entry must return.

        If any value is NaN, all values are set to NaN: programs of other compilers may not sort NaN first.
        """
        logits = self._row_of(self._all_logits(), index) if with_logits else None
        if self._values is None or self._indices is None:
            return Candidates(np.empty(0), np.empty(0, np.int64), logits)
        values = self._row_of(self._values, index)
        if self._holds_nan and np.isnan(values).any():
            values = np.full_like(values, np.nan)
        return Candidates(values, self._row_of(self._indices, index), logits)

    def _all_logits(self) -> Array:
        assert self._fetch_logits is not None, "asked for logits of an entry that returns none"
        if self._logits is None:
            self._logits = self._fetch_logits().astype(np.float32, copy=False)
            if self._record is not None:
                rows = range(len(self._tasks))
                self._record.logits = [logits_sum(self._row_of(self._logits, row)) for row in rows]
        return self._logits

    def note(self, record: Run) -> Fetched | None:
        """Return the fetched values and indices; `record` also gets checksums of logits fetched later."""
        self._record = record
        if self._values is None or self._indices is None:
            return None
        values, indices = self._last_rows(self._values), self._last_rows(self._indices)
        return Fetched(values, indices, len(self._tasks), self._holds_nan)

    def _last_rows(self, array: Array) -> Array:
        """Return the last token row of each task as `[N or more, 1, K]`, the rows that `_row_of` returns."""
        if array.shape[1] == 1:
            return array
        last = [len(task.token_ids) - 1 for task in self._tasks]
        rows: Array = array[np.arange(len(last)), last][:, None]
        return rows

    def _row_of(self, array: Array, index: int) -> Array:
        last = 0 if array.shape[1] == 1 else len(self._tasks[index].token_ids) - 1
        row: Array = array[index, last]
        return row
