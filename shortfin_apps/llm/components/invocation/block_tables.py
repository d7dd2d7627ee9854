"""Block tables of batches, gathered from rows that are kept from step to step.

A table has the shape `[rows, B]` and holds page IDs: a row for each task in the batch's order, then padding
rows. Columns past a task's pages hold the scratch page. A row is filled from the page list of the task's
lease. Until the lease is released, pages are only appended to that list; the release empties it. A list's row
therefore stays valid while the list has the same identity and length. Updates are counted as:

    joined   a row is filled for a list that has none
    grew     a list's new pages are appended to its row

The tables of the last batches stay on the device, except those with other pages than the lists'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.invocation.entry_counts import TableCounts
from shortfin_apps.llm.components.runtime.device import DeviceBuffer

Array = npt.NDArray[Any]
PageList = Sequence[int]  # the lease's own list
# Batches alternate: decodes and prefills, or decodes of more requests than fit in one invocation.
MAX_TABLES = 8
_FEWEST_ROWS, _FEWEST_PAGES = 16, 16  # of the kept rows; doubled as needed
_NO_PAGES = 0  # the row of all empty lists
Replaced = Sequence[tuple[int, int, int]]  # row, column and page ID of entries that are not in the page lists
_Key = tuple[tuple[int, ...], tuple[int, ...], int, int]  # `id` and length of each page list, rows, blocks


class BlockTables:
    """The rows of all leases, and the tables of the last MAX_TABLES batches. Not thread-safe."""

    def __init__(self, upload: Callable[[Array], DeviceBuffer]) -> None:
        self._upload = upload
        self._pages = np.zeros((_FEWEST_ROWS, _FEWEST_PAGES), np.int64)
        self._rows: dict[int, int] = {}  # index into `_pages` by the `id` of a page list
        # By row, with the number of pages; the reference keeps another list from getting the same `id`.
        self._lists: list[PageList] = [(0,)]
        self._num_pages = [0]
        self._on_device: dict[_Key, tuple[Sequence[PageList], DeviceBuffer]] = {}  # least recently used first
        self._rows_joined = self._rows_grew = self._uploads = 0

    @property
    def counts(self) -> TableCounts:
        return TableCounts(rows_joined=self._rows_joined, rows_grew=self._rows_grew, uploads=self._uploads)

    def on_device(
        self, page_lists: Sequence[PageList], rows: int, blocks: int, replaced: Replaced = ()
    ) -> DeviceBuffer:
        """Return a batch's table on the device, padded or truncated to `[rows, blocks]`.

        `page_lists` has the page list of each task.
        """
        key = tuple(map(id, page_lists)), tuple(map(len, page_lists)), rows, blocks
        if replaced:
            array = self._gathered(self._rows_of(page_lists, *key[:2]), rows, blocks)
            for row, column, page_id in replaced:
                array[row, column] = page_id
            self._uploads += 1
            return self._upload(array)
        kept = self._on_device.pop(key, None)
        if kept is None:
            table = self._upload(self._gathered(self._rows_of(page_lists, *key[:2]), rows, blocks))
            self._uploads += 1
            kept = page_lists, table  # as long as the lists are kept, no other list has the `id` of one
        self._on_device[key] = kept
        if len(self._on_device) > MAX_TABLES:
            del self._on_device[next(iter(self._on_device))]
        return kept[1]

    def _rows_of(
        self, page_lists: Sequence[PageList], ids: Sequence[int], lengths: Sequence[int]
    ) -> list[int]:
        """Return the row of each list, given their `id` and length; the rows then have all their pages."""
        rows, num_pages = [self._rows.get(each, _NO_PAGES) for each in ids], self._num_pages
        for index, length in enumerate(lengths):
            if num_pages[rows[index]] != length:
                rows[index] = self._row(page_lists[index])
        return rows

    def _row(self, page_ids: PageList) -> int:
        """Return the row of a list, which then has all its pages."""
        if not page_ids:
            return _NO_PAGES
        row = self._rows.get(id(page_ids))
        if row is None:
            row = self._joined(page_ids)
        elif len(page_ids) != self._num_pages[row]:
            self._rows_grew += 1
            self._fill(row)
        return row

    def _joined(self, page_ids: PageList) -> int:
        """Add a row for a list."""
        row = self._free_row()
        self._lists[row], self._num_pages[row] = page_ids, 0
        self._rows[id(page_ids)] = row
        self._pages[row] = 0
        self._rows_joined += 1
        self._fill(row)
        return row

    def _free_row(self) -> int:
        """Return a new row, or that of a released list if all are in use."""
        if len(self._lists) == len(self._pages):
            for row, page_ids in enumerate(self._lists):
                if not page_ids:
                    del self._rows[id(page_ids)]
                    return row
            self._pages = _enlarged(self._pages, 2 * len(self._pages), self._pages.shape[1])
        self._lists.append(())
        self._num_pages.append(0)
        return len(self._lists) - 1

    def _fill(self, row: int) -> None:
        """Copy the new pages of a row's list into it."""
        page_ids, begin = self._lists[row], self._num_pages[row]
        if len(page_ids) > self._pages.shape[1]:
            self._pages = _enlarged(self._pages, len(self._pages), 2 * len(page_ids))
        self._pages[row, begin : len(page_ids)] = page_ids[begin:]
        self._num_pages[row] = len(page_ids)

    def _gathered(self, own: list[int], rows: int, blocks: int) -> Array:
        table = np.zeros((rows, blocks), np.int64)
        width = min(blocks, self._pages.shape[1])
        table[: len(own), :width] = self._pages[own, :width]
        return table


def _enlarged(pages: Array, rows: int, columns: int) -> Array:
    larger = np.zeros((rows, columns), np.int64)
    larger[: pages.shape[0], : pages.shape[1]] = pages
    return larger
