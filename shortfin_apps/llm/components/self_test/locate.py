"""Finds the first layer that a faulty entry computes wrongly, by the keys and values that the entry writes.

The entry runs again on a page table small enough to be downloaded. The pages that the entry writes are
compared with the pages of an entry that passed. If no entry passed, sums over the pages are compared with the
sums in the self-test's file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.self_test.entries import EntryRuns
from shortfin_apps.llm.components.self_test.pages import Planes, read_planes
from shortfin_apps.llm.components.self_test.rows import Row
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Outcome
from shortfin_apps.llm.contract.abi import ROW_LAYOUTS
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.self_test_file import PageSums, SelfTestFile

logger = logging.getLogger(__name__)
Array = npt.NDArray[Any]

_Segment = tuple[int, int, int]  # the index of a prompt, and its positions `start .. stop - 1`

NUM_PAGES = 64
# Allowed deviation of sums of keys and values, in units of the file's tolerance for logits.
SLACK = 2.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where an entry's results first differ: in `what` (keys or values) of `layer`.

    If `layer` is None, the error is after the last layer's keys and values. `than` names what the entry was
    compared with.
    """

    layer: int | None
    what: str
    than: str

    def __str__(self) -> str:
        if self.layer is None:
            return f"its keys and values equal {self.than}'s: the error is after the last layer's"
        return f"first in layer {self.layer}: {self.what} differ from those of {self.than}"


@dataclass(frozen=True, slots=True)
class Locator:
    """Runs entries of `program` again, on separate page tables."""

    device: Device
    program: Program
    config: ModelConfig
    file: SelfTestFile
    same_bits: bool  # whether all entries compute bit-identical results for a row, as on CPUs

    def locate_first(self, failures: Sequence[EntryFailure], outcome: Outcome) -> Location | None:
        """Locate the fault of the first failed entry.

        Returns None if no entry failed, or if the first failed entry could not be run.
        """
        if not failures or failures[0].entry in outcome.broken:
            return None
        failed = {each.entry for each in failures}
        passed = [entry for entry in outcome.entries if entry not in failed | set(outcome.untested)]
        return self.locate(failures[0].entry, passed)

    def locate(self, entry: str, others: Sequence[str]) -> Location | None:
        """Find the first layer that `entry` computes wrongly; `others` are entries that passed.

        Returns None if the entry writes no keys and values, or if it fails when it runs again.
        """
        try:
            wrong = self._written_by(entry)
            if not wrong:
                return None
            for other in others:
                right = self._written_by(other)
                if shared := wrong.keys() & right.keys():
                    return self._by_bits(wrong, right, sorted(shared), other)
            return self._by_sums(wrong)
        except Exception as error:  # the runtimes have no common exception for too little memory
            logger.warning("`%s` cannot be looked into: %s", entry, error)
            return None

    def _written_by(self, entry: str) -> dict[_Segment, list[Planes]]:
        """Run `entry` until it has written pages; return K and V of each layer for one row of each segment.

        A segment has several readings if the layout of its page is ambiguous (see `read_planes`). Empty if
        the entry writes no pages, or if there are too few pages.
        """
        runner, runs = self._runs()
        shape = next(each for each in runs.shapes if each.entry == entry)
        if shape.layout in ROW_LAYOUTS:
            return {}
        with closing(runs.of(shape)) as invocations:
            while not runs.rows:
                if next(invocations, None) is None:
                    return {}
            slabs = runner.download_pages()
            rows = {(row.prompt, *row.summed): row for row in runs.rows if row.summed is not None}
            return {key: self._planes(slabs, row) for key, row in rows.items()}

    def _runs(self) -> tuple[BatchRunner, EntryRuns]:
        num_window_pages = 0 if self.config.window_tokens is None else NUM_PAGES
        runner = make_runner(self.device, self.program, self.config, NUM_PAGES, num_window_pages)
        cache = make_page_cache(self.config, "none", NUM_PAGES, num_window_pages)
        return runner, EntryRuns(runner, cache, self.file)

    def _planes(self, slabs: Sequence[Array], row: Row) -> list[Planes]:
        """Return K and V of each layer in the row's first own page, for each possible page layout."""
        lease, page = row.lease, {}
        for slab, pages in zip(self.config.slabs, slabs, strict=True):
            page_ids = lease.page_ids if slab.pool == "whole" else lease.window_page_ids
            assert page_ids is not None, "the model has windows"
            page[slab.pool] = pages[page_ids[row.own_page]]
        return read_planes(page, self.config, self.file.pools)

    def _by_bits(
        self,
        wrong: dict[_Segment, list[Planes]],
        right: dict[_Segment, list[Planes]],
        keys: Sequence[_Segment],
        other: str,
    ) -> Location:
        than = f"`{other}`"
        found: list[tuple[int, str]] = []
        for key in keys:
            ours, theirs = wrong[key][0], right[key][0]
            for layer in sorted(ours):
                names = [
                    name
                    for name, a, b in zip(("keys", "values"), ours[layer], theirs[layer], strict=True)
                    if self._differ(a, b)
                ]
                if names:
                    found.append((layer, " and ".join(names)))
                    break
        return Location(*min(found), than) if found else Location(None, "", than)

    def _differ(self, a: Array, b: Array) -> bool:
        """Return whether two planes differ: in any bit if `same_bits`, else by more than SLACK allows."""
        if self.same_bits:
            return not np.array_equal(a, b)
        return not deviation(sums_of(a), sums_of(b)) <= SLACK * self.file.tolerance

    def _by_sums(self, wrong: dict[_Segment, list[Planes]]) -> Location:
        readings = list(zip(*wrong.values(), strict=True))
        found = [list(self._deviating(dict(zip(wrong, reading, strict=True)))) for reading in readings]
        best = min(found, key=len)  # the possible page layout that matches the file best
        than = "the reference"
        return Location(*min(best), than) if best else Location(None, "", than)

    def _deviating(self, planes: dict[_Segment, Planes]) -> Iterator[tuple[int, str]]:
        """Yield layers with sums that deviate too much from the file's sums, with "keys" or "values"."""
        for (prompt, start, stop), layers in planes.items():
            for sums in self.file.prompts[prompt].pages:
                if (sums.start, sums.stop) == (start, stop) and sums.layer in layers:
                    yield from self._deviating_planes(sums, layers[sums.layer])

    def _deviating_planes(self, sums: PageSums, planes: tuple[Array, Array]) -> Iterator[tuple[int, str]]:
        for name, known, plane in zip(("keys", "values"), (sums.keys, sums.values), planes, strict=True):
            if not deviation(sums_of(plane), known) <= SLACK * self.file.tolerance:
                yield sums.layer, name


def sums_of(plane: Array) -> tuple[float, float]:
    """Return the sum of the elements, and the sum of their squares."""
    with np.errstate(all="ignore"):  # a faulty entry may write anything
        wide = plane.astype(np.float64)
        return float(wide.sum()), float((wide * wide).sum())


def deviation(found: tuple[float, float], known: tuple[float, float]) -> float:
    """Return the relative distance of two results of `sums_of`; NaN if elements are not finite.

    Sums are compared in units of the square root of `known`'s sum of squares.
    """
    size = known[1] or 1.0
    return max(abs(found[0] - known[0]) / float(size**0.5), abs(found[1] - known[1]) / size / 2)
