"""Arguments of the entries that read full rows of logits on the device, to draw tokens or for logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.loop_state import Fields, padded, padded_sampling
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.sampling.row_edits import RowEdits, joined, joined_bitmasks, words_of
from shortfin_apps.llm.contract.abi import EditField, PenaltyField

Array = npt.NDArray[Any]

# Edits are padded to a power of two: with few distinct sizes, buffers are reused more often.
LEAST_EDITS = 256


def padded_draws(
    size: int, tasks: Sequence[LlmTaskInput], rows: Sequence[int], fields: Fields, *, stores: bool = True
) -> dict[str, Array]:
    """Return the arguments of a `sample` entry that draws the tokens of `rows`, padded to `size` draws.

    `rows` are indices of `tasks` and of a batch's logits. The device stores the tokens in the requests' slots
    of its token table if it `stores` them.
    """
    drawn = [tasks[row] for row in rows]
    requests = [task.request for task in drawn]
    return {
        "row_indices": padded(rows, size, 0),
        "slots": padded([request.slot for request in requests] if stores else [], size, -1),
        "positions": padded([task.seq_len - 1 for task in drawn], size, -1),
        "sampling": padded_sampling([fields(request) for request in requests], size),
    }


def padded_logprobs(rows: int, slots: Mapping[int, int]) -> dict[str, Array]:
    """Return the arguments of a `logprobs` entry: each row of a batch with the slot that has its token."""
    return {
        "row_indices": padded(list(slots), rows, 0),
        "slots": padded(list(slots.values()), rows, -1),
    }


class LastUpload:
    """Arrays on the device, uploaded again only if they change: those of a steady decode do not."""

    def __init__(self, upload: Callable[[Array], DeviceBuffer]) -> None:
        self._upload = upload
        self._content: dict[str, bytes] = {}
        self._buffers: dict[str, DeviceBuffer] = {}

    def on_device(self, arrays: Mapping[str, Array]) -> Mapping[str, DeviceBuffer]:
        content = {name: array.tobytes() for name, array in arrays.items()}
        if content != self._content:
            self._buffers = {name: self._upload(array) for name, array in arrays.items()}
            self._content = content
        return self._buffers


def padded_edits(rows: int, edits: Sequence[RowEdits], vocab_size: int) -> dict[str, Array]:
    """Return the arguments that `adjusted_sample` takes after the ones of `padded_draws`."""
    penalties = np.zeros((len(PenaltyField), rows), np.float32)
    for column, of_row in enumerate(edits):
        penalties[:, column] = of_row.penalties
    return {
        "penalties": penalties,
        "edits": _padded_columns(joined(edits, vocab_size)),
        **_allowed(rows, edits, vocab_size),
    }


def _padded_columns(columns: Array) -> Array:
    """Return the argument `edits` [fields, E], padded to a power of two."""
    total = columns.shape[1]
    padded = np.zeros((len(EditField), max(LEAST_EDITS, 1 << (total - 1).bit_length())), np.int32)
    padded[:, :total] = columns
    padded[EditField.ROW, total:] = -1
    return padded


def _allowed(rows: int, edits: Sequence[RowEdits], vocab_size: int) -> dict[str, Array]:
    """Return the arguments `allowed` [M, words], with M at least 1, and `allowed_indices` [rows]."""
    of_rows = {row: of_row.allowed for row, of_row in enumerate(edits) if of_row.allowed is not None}
    indices = np.full(rows, -1, np.int64)
    indices[list(of_rows)] = range(len(of_rows))
    empty = np.zeros((1, words_of(vocab_size)), np.int32)
    allowed = joined_bitmasks(list(of_rows.values()), vocab_size) if of_rows else empty
    return {"allowed": allowed, "allowed_indices": indices}
