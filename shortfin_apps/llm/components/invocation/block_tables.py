"""Block tables of batches. Tables are kept and updated, because batches change little from step to step.

A table has the shape `[rows, B]` and holds page IDs: a row for each task in the batch's order, then padding
rows. Columns past a task's pages hold the scratch page. A row is filled from the page list of the task's
lease. Until the lease is released, pages are only appended to that list. The identity of the list and the
number of pages copied from it therefore determine the row's content. Updates are counted as:

    plan      every row of a batch of several tasks is filled, because no kept table has any of these rows
    joined    one row is filled: other rows of the batch are in a kept table, or the batch has a single task
    grew      a task's new pages are appended to its row

Rows of a kept table are copied to the new one in one operation, in any order. The full table is uploaded
again when a row or the padded shape has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.invocation.entry_counts import PlanCounts
from shortfin_apps.llm.components.runtime.device import DeviceBuffer

Array = npt.NDArray[Any]
PageList = Sequence[int]  # the lease's own list
# Batches alternate: decodes and prefills, or decodes of more requests than fit in one invocation.
MAX_TABLES = 8
_SPARE_BLOCKS = 8  # columns of a new table reserved for future pages


class BlockTables:
    """The tables of the last MAX_TABLES batches. Not thread-safe."""

    def __init__(self, upload: Callable[[Array], DeviceBuffer]) -> None:
        self._upload = upload
        self._tables: list[_BlockTable] = []  # least recently used first
        self._plans = self._rows_joined = self._rows_grew = self._uploads = 0

    @property
    def counts(self) -> PlanCounts:
        return PlanCounts(
            plans=self._plans,
            rows_joined=self._rows_joined,
            rows_grew=self._rows_grew,
            uploads=self._uploads,
        )

    def on_device(self, page_lists: Sequence[PageList], rows: int, blocks: int) -> DeviceBuffer:
        """Return a batch's table on the device, padded to `[rows, blocks]`.

        `page_lists` has the page list of each task.
        """
        table = self._updated(page_lists) or self._new(page_lists)
        if table.buffer is None or table.buffer.shape != (rows, blocks):
            table.buffer = self._upload(table.padded(rows, blocks))
            self._uploads += 1
        return table.buffer

    def _updated(self, page_lists: Sequence[PageList]) -> _BlockTable | None:
        """Return the kept table of exactly these lists, with their new pages added; None if there is none."""
        for index in reversed(range(len(self._tables))):
            if (grown := self._tables[index].grown_rows(page_lists)) is not None:
                table = self._tables.pop(index)
                self._tables.append(table)
                table.fill(grown)
                self._rows_grew += len(grown)
                return table
        return None

    def _new(self, page_lists: Sequence[PageList]) -> _BlockTable:
        """Create a table with rows copied from the most similar kept one; drop that one if fully copied."""
        table = _BlockTable(page_lists)
        nearest = self._nearest(table)
        carried = [] if nearest is None else table.carry_over(nearest)
        if nearest is not None and len(carried) == nearest.num_tasks:
            self._tables.remove(nearest)
        grown = table.grown_rows(page_lists)
        assert grown is not None, "the table was made for these lists"
        table.fill(grown)
        self._tables.append(table)
        del self._tables[:-MAX_TABLES]
        num_joined = len(page_lists) - len(carried)
        is_plan = num_joined == len(page_lists) and num_joined > 1
        self._plans += is_plan
        self._rows_joined += 0 if is_plan else num_joined
        self._rows_grew += len(grown) - num_joined
        return table

    def _nearest(self, table: _BlockTable) -> _BlockTable | None:
        """Return the kept table with the most rows of `table`, or the first with more than half of these."""
        most, nearest = 0, None
        for kept in reversed(self._tables):
            if (common := table.num_common(kept)) > most:
                most, nearest = common, kept
            if 2 * most > table.num_tasks:
                break
        return nearest


class _BlockTable:
    """The table of one batch; `buffer` is its copy on the device, or None if the copy is out of date.

    The page lists belong to leases. A table keeps references to its lists, so that no new list can get the
    `id()` of an old one. The list of a released lease is empty.
    """

    def __init__(self, page_lists: Sequence[PageList]) -> None:
        self.buffer: DeviceBuffer | None = None
        self._page_ids = list(page_lists)
        self._lengths = [0] * len(page_lists)  # pages copied into each row
        self._rows = {id(page_ids): row for row, page_ids in enumerate(self._page_ids)}
        self._table = np.zeros((len(page_lists), max(map(len, self._page_ids)) + _SPARE_BLOCKS), np.int64)

    @property
    def num_tasks(self) -> int:
        return len(self._page_ids)

    def grown_rows(self, page_lists: Sequence[PageList]) -> list[int] | None:
        """Return the rows with new pages in their lists; None if this is another batch's table."""
        if len(page_lists) != len(self._page_ids):
            return None
        grown = []
        for row, page_ids in enumerate(page_lists):
            if page_ids is not self._page_ids[row]:
                return None
            if len(page_ids) != self._lengths[row]:
                grown.append(row)
        return grown

    def fill(self, rows: Sequence[int]) -> None:
        """Copy the new pages of the rows' lists into these rows."""
        for row in rows:
            page_ids, begin = self._page_ids[row], self._lengths[row]
            if len(page_ids) > self._table.shape[1]:
                self._widen(2 * len(page_ids))
            self._table[row, begin : len(page_ids)] = page_ids[begin:]
            self._lengths[row] = len(page_ids)
            self.buffer = None

    def num_common(self, other: _BlockTable) -> int:
        return len(self._rows.keys() & other._rows.keys())

    def carry_over(self, other: _BlockTable) -> list[int]:
        """Copy the rows of common leases from `other`; returns the indices of these rows in this table."""
        pairs = [(row, other._rows[key]) for key, row in self._rows.items() if key in other._rows]
        own, others = [row for row, _ in pairs], [row for _, row in pairs]
        width = min(self._table.shape[1], other._table.shape[1])
        self._table[own, :width] = other._table[others, :width]
        for row, source in pairs:
            self._lengths[row] = other._lengths[source]
        return own

    def padded(self, rows: int, blocks: int) -> Array:
        """Return the table padded with the scratch page to `[rows, blocks]`, or truncated to `blocks`."""
        table = np.zeros((rows, blocks), np.int64)
        width = min(blocks, self._table.shape[1])
        table[: self.num_tasks, :width] = self._table[:, :width]
        return table

    def _widen(self, blocks: int) -> None:
        table = np.zeros((self.num_tasks, blocks), np.int64)
        table[:, : self._table.shape[1]] = self._table
        self._table = table
