"""Block tables, laid out once and kept: who is in a batch changes little from step to step.

A table is `[rows, B]` page ids: a row for each task in the batch's order, then padding rows. What a row does
not own is the scratch page. Rows are laid out from the page lists of leases, which are added to at their end
alone until they are released: a list and how much of it was laid out tell what a row holds.

    plan      all rows of a batch of several tasks are laid out, as no kept table has one of them
    joined    one row is laid out, beside rows that are kept or for a task alone
    grew      the pages that a row's task got since are added to the row

Rows that stay are carried over in one copy, whatever becomes of their order. The device gets a table whole,
an upload, when anything of it has changed, its shape among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.entry_counts import PlanCounts
from shortfin_apps.llm.components.runtime.device import DeviceBuffer

Array = npt.NDArray[Any]
# Of the batches that take turns: decodes and prefills, or decodes of more requests than fit an invocation.
MAX_TABLES = 8
_SPARE_BLOCKS = 8  # room for pages to come, in a table as it is made


class BlockTables:
    """The tables of the last few batches. Not thread-safe."""

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

    def on_device(self, tasks: Sequence[LlmTaskInput], rows: int, blocks: int) -> DeviceBuffer:
        """The table `[rows, blocks]` of a batch of at most so many tasks."""
        table = self._kept(tasks) or self._laid_out(tasks)
        if table.buffer is None or table.buffer.shape != (rows, blocks):
            table.buffer = self._upload(table.cut(rows, blocks))
            self._uploads += 1
        return table.buffer

    def _kept(self, tasks: Sequence[LlmTaskInput]) -> _BlockTable | None:
        """The table of this very batch, brought up to date."""
        for index in reversed(range(len(self._tables))):
            if (grown := self._tables[index].grown_rows(tasks)) is not None:
                table = self._tables.pop(index)
                self._tables.append(table)
                table.lay_out(grown)
                self._rows_grew += len(grown)
                return table
        return None

    def _laid_out(self, tasks: Sequence[LlmTaskInput]) -> _BlockTable:
        """A new table with the rows of the one that has most of them, which goes if it has no others."""
        table = _BlockTable(tasks)
        nearest = self._nearest(table)
        carried = [] if nearest is None else table.carry_over(nearest)
        if nearest is not None and len(carried) == nearest.num_tasks:
            self._tables.remove(nearest)
        grown = table.grown_rows(tasks)
        assert grown is not None, "a table is of the batch that it was made of"
        table.lay_out(grown)
        self._tables.append(table)
        del self._tables[:-MAX_TABLES]
        num_joined = len(tasks) - len(carried)
        is_plan = num_joined == len(tasks) and num_joined > 1
        self._plans += is_plan
        self._rows_joined += 0 if is_plan else num_joined
        self._rows_grew += len(grown) - num_joined
        return table

    def _nearest(self, table: _BlockTable) -> _BlockTable | None:
        """The kept table with most of its rows; the last one used that has more than half of them will do."""
        most, nearest = 0, None
        for kept in reversed(self._tables):
            if (common := table.num_common(kept)) > most:
                most, nearest = common, kept
            if 2 * most > table.num_tasks:
                break
        return nearest


class _BlockTable:
    """The table of one batch; `buffer` is its copy on the device, None where that is out of date.

    The page lists belong to leases. They are held on to so that no later list can be taken for one of them; a
    lease that was released has emptied its own.
    """

    def __init__(self, tasks: Sequence[LlmTaskInput]) -> None:
        self.buffer: DeviceBuffer | None = None
        self._page_lists = [task.page_ids for task in tasks]
        self._lengths = [0] * len(tasks)  # of what is laid out
        self._rows = {id(pages): row for row, pages in enumerate(self._page_lists)}
        self._ids = np.zeros((len(tasks), max(map(len, self._page_lists)) + _SPARE_BLOCKS), np.int64)

    @property
    def num_tasks(self) -> int:
        return len(self._page_lists)

    def grown_rows(self, tasks: Sequence[LlmTaskInput]) -> list[int] | None:
        """The rows of which something is not laid out; None when this is another batch's table."""
        if len(tasks) != len(self._page_lists):
            return None
        grown = []
        for row, task in enumerate(tasks):
            if (pages := task.page_ids) is not self._page_lists[row]:
                return None
            if len(pages) != self._lengths[row]:
                grown.append(row)
        return grown

    def lay_out(self, rows: Sequence[int]) -> None:
        """Writes what is missing in these rows."""
        for row in rows:
            pages, begin = self._page_lists[row], self._lengths[row]
            if len(pages) > self._ids.shape[1]:
                self._widen(2 * len(pages))
            self._ids[row, begin : len(pages)] = pages[begin:]
            self._lengths[row] = len(pages)
            self.buffer = None

    def num_common(self, other: _BlockTable) -> int:
        return len(self._rows.keys() & other._rows.keys())

    def carry_over(self, other: _BlockTable) -> list[int]:
        """Takes over what the other table has of the same rows, and says which those are."""
        pairs = [(row, other._rows[key]) for key, row in self._rows.items() if key in other._rows]
        own, others = [row for row, _ in pairs], [row for _, row in pairs]
        width = min(self._ids.shape[1], other._ids.shape[1])
        self._ids[own, :width] = other._ids[others, :width]
        for row, source in pairs:
            self._lengths[row] = other._lengths[source]
        return own

    def cut(self, rows: int, blocks: int) -> Array:
        """`[rows, blocks]`: with padding rows and, where the batch needs less, without the last pages."""
        table = np.zeros((rows, blocks), np.int64)
        width = min(blocks, self._ids.shape[1])
        table[: self.num_tasks, :width] = self._ids[:, :width]
        return table

    def _widen(self, blocks: int) -> None:
        ids = np.zeros((self.num_tasks, blocks), np.int64)
        ids[:, : self._ids.shape[1]] = self._ids
        self._ids = ids
