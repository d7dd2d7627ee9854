"""Checksums of an invocation's results, by which records of two runs can be compared."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.recorder.records import NOT_FINITE_ROW, Run

Array = npt.NDArray[Any]

# Only every LOGITS_STRIDE-th logit is checksummed, as all of them would take a millisecond for a few rows.
LOGITS_STRIDE = 61


def candidates_sums(values: Array, indices: Array, *, holds_nan: bool) -> list[int]:
    """Return the CRC-32 of each row of `values` and `indices` [N, K]; NOT_FINITE_ROW for rows with NaN.

    Looks for NaN only if `holds_nan`.
    """
    size, index_size = values.shape[-1] * values.itemsize, indices.shape[-1] * indices.itemsize
    octets, index_octets = memoryview(values.tobytes()), memoryview(indices.tobytes())
    crc32 = zlib.crc32
    sums = [
        crc32(index_octets[row * index_size : (row + 1) * index_size], crc32(octets[row * size :][:size]))
        for row in range(len(values))
    ]
    if holds_nan:
        for row in np.flatnonzero(np.isnan(values).any(axis=-1)).tolist():
            sums[row] = NOT_FINITE_ROW
    return sums


class Fetched(NamedTuple):
    """A batch's candidates as fetched: `values` and `indices` [rows, 1, K], where rows >= `num_rows`.

    Rows from `num_rows` on are padding. `holds_nan` is whether any value may be NaN.
    """

    values: Array
    indices: Array
    num_rows: int
    holds_nan: bool

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes

    def note(self, record: Run) -> None:
        """Write the best candidates and checksums into the record."""
        values, indices = self.values[: self.num_rows, 0], self.indices[: self.num_rows, 0]
        record.best = indices[:, 0].tolist()
        record.checksums = candidates_sums(values, indices, holds_nan=self.holds_nan)


def logits_sum(logits: Array) -> int:
    """Return the CRC-32 of a sample of a row's `logits` [V]; NOT_FINITE_ROW if the sample has a NaN."""
    some = logits[::LOGITS_STRIDE]
    return NOT_FINITE_ROW if np.isnan(some).any() else zlib.crc32(some.tobytes())
