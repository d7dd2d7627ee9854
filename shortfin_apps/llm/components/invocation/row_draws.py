"""Draws of tokens from whole rows of logits that an entry has left on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.abi import SamplingField

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RowDraw:
    """A draw from row `row` of a batch, whose last token is at `position`; `sampling` is by SamplingField."""

    row: int
    position: int
    sampling: Sequence[int]


def padded_draws(rows: int, draws: Sequence[RowDraw]) -> dict[str, Array]:
    """The arguments of a `sample` behind values and logits, padded to `rows`."""
    row_indices = np.zeros(rows, np.int64)
    positions = np.full(rows, -1, np.int64)
    fields = np.zeros((len(SamplingField), rows), np.int64)
    for column, draw in enumerate(draws):
        row_indices[column] = draw.row
        positions[column] = draw.position
        fields[:, column] = draw.sampling
    return {"row_indices": row_indices, "positions": positions, "sampling": fields}
