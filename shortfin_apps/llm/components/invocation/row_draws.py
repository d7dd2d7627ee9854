"""Arguments of the entries that read full rows of logits on the device, to draw tokens or for logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.loop_state import Fields, padded, padded_sampling
from shortfin_apps.llm.components.invocation.slot_tables import SlotTables, counts_before
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import TokenCounts
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.sampling.row_edits import RowEdits, joined, joined_bitmasks, words_of
from shortfin_apps.llm.contract.abi import EditField, PenaltyField

Array = npt.NDArray[Any]

# Edits are padded to a power of two: with few distinct sizes, buffers are reused more often.
LEAST_EDITS = 256


def padded_draws(
    size: int,
    tasks: Sequence[LlmTaskInput],
    rows: Sequence[int],
    fields: Fields,
    *,
    slots: Sequence[int] | None = None,
) -> dict[str, Array]:
    """Return the arguments of a `sample` entry that draws the tokens of `rows`, padded to `size` draws.

    `rows` are indices of `tasks` and of a batch's logits. The device stores the tokens in these `slots` of
    its token table, one per row; None: in the requests' slots; empty: it stores none.
    """
    drawn = [tasks[row] for row in rows]
    requests = [task.request for task in drawn]
    if slots is None:
        slots = [request.slot for request in requests]
    return {
        "row_indices": padded(rows, size, 0),
        "slots": padded(slots, size, -1),
        "positions": padded([task.seq_len - 1 for task in drawn], size, -1),
        "sampling": padded_sampling([fields(request) for request in requests], size),
    }


def padded_logprobs(rows: int, slots: Mapping[int, int]) -> dict[str, Array]:
    """Return the arguments of a `logprobs` entry: each row of a batch with the slot that has its token."""
    return {
        "row_indices": padded(list(slots), rows, 0),
        "slots": padded(list(slots.values()), rows, -1),
    }


@dataclass(slots=True)
class _Kept:
    """The last arguments of draws that begin at a row, as arrays and on the device.

    `edits` identify the rows' requests, because each request has separate edits; empty if the arguments set
    counts, so that no other draws can have all of them. `masked`: the rows' leases, if the only edits are
    bitmasks; each start of a request has a separate lease. `seq_lens`: lengths of the tasks that the
    arguments are for.
    """

    entry: str
    rows: Sequence[int]
    edits: Sequence[RowEdits]
    masked: list[Lease | None]
    seq_lens: list[int]
    arrays: dict[str, Array]
    buffers: Mapping[str, DeviceBuffer]

    def serves(self, entry: str, rows: Sequence[int], edits: Sequence[RowEdits], seq_lens: list[int]) -> bool:
        return (self.entry, self.rows, self.edits, self.seq_lens) == (entry, rows, edits, seq_lens)

    def follows(
        self, entry: str, rows: Sequence[int], masked: list[Lease | None], seq_lens: list[int]
    ) -> bool:
        """Return whether draws of rows with bitmasks alone are of the same leases, one token later."""
        return (self.entry, self.rows, self.masked, self.seq_lens) == (entry, rows, masked, seq_lens)

    def with_masks(self, edits: Sequence[RowEdits], vocab_size: int) -> dict[str, Array]:
        """Return the arguments one token later, with the bitmasks of these edits."""
        allowed = [of_row.allowed for of_row in edits if of_row.allowed is not None]
        return {**self.arrays, "allowed": joined_bitmasks(allowed, vocab_size)}

    def equal(self, name: str, array: Array) -> DeviceBuffer | None:
        """Return the argument on the device if it has these values. Bitmasks are not compared."""
        if array is (kept := self.arrays[name]):
            return self.buffers[name]
        is_equal = name != "allowed" and kept.shape == array.shape and kept.tobytes() == array.tobytes()
        return self.buffers[name] if is_equal else None

    def take(self) -> tuple[Mapping[str, Array], Mapping[str, DeviceBuffer]]:
        """Return the arguments of the next draws, after which the device has advanced its positions."""
        arrays, positions = self.arrays, self.arrays["positions"]
        self.arrays = {**arrays, "positions": positions + (positions >= 0)}
        self.seq_lens = [seq_len + 1 for seq_len in self.seq_lens]
        return arrays, self.buffers


class DrawArguments:
    """Arguments of the entries that draw tokens from existing rows.

    An `adjusted_sample` advances the positions, and counts the tokens in the device's table. While the same
    requests draw, the arguments of one step therefore serve the next one, and nothing is uploaded. Under
    grammars only the bitmasks are.
    """

    def __init__(self, upload: Callable[[Array], DeviceBuffer], tables: SlotTables) -> None:
        self._upload = upload
        self._tables = tables
        self._kept: dict[int, _Kept] = {}  # by first row, as a batch may need several launches

    def of(
        self,
        shape: Shape,
        tasks: Sequence[LlmTaskInput],
        rows: Sequence[int],
        fields: Fields,
        edits: Sequence[RowEdits],
        *,
        slots: Sequence[int] | None = None,
    ) -> tuple[Mapping[str, Array], Mapping[str, DeviceBuffer]]:
        """Return the arguments, as arrays and on the device, by name; with `edits` of an `adjusted_sample`.

        Callers must then queue the draws, and call `forget` if that fails. Takes the parameters of
        `padded_draws`, and the edits of each row.
        """
        stores = slots is None
        drawn = [tasks[row] for row in rows]
        seen = [self._seen(task, of_row, stores) for task, of_row in zip(drawn, edits, strict=False)]
        is_steady = all(counts is None for counts in seen)
        seq_lens = [task.seq_len for task in drawn]
        kept = self._kept.get(rows[0]) if edits and stores else None
        if kept is not None and is_steady and kept.serves(shape.entry, rows, edits, seq_lens):
            return kept.take()
        masked = [task.request.lease for task in drawn] if edits and all(map(_has_mask_only, edits)) else []
        if kept is not None and masked and kept.follows(shape.entry, rows, masked, seq_lens):
            arrays = kept.with_masks(edits, self._tables.vocab_size)
        else:
            arrays = padded_draws(shape.rows, tasks, rows, fields, slots=slots)
            if edits:
                arrays |= padded_edits(shape.rows, edits, seen, self._tables.vocab_size)
        buffers = {}
        for name, array in arrays.items():
            buffer = None if kept is None else kept.equal(name, array)
            buffers[name] = self._upload(array) if buffer is None else buffer
        if not edits or not stores:
            return arrays, buffers
        of_draws = edits if is_steady else ()
        kept = self._kept[rows[0]] = _Kept(shape.entry, rows, of_draws, masked, seq_lens, arrays, buffers)
        return kept.take()

    def forget(self) -> None:
        """Upload everything again, after an invocation has failed: it may not have advanced the positions."""
        self._kept.clear()
        self._tables.forget()

    def _seen(self, task: LlmTaskInput, edits: RowEdits, stores: bool) -> TokenCounts | None:
        """Return the counts of a row that the device lacks; a draw into no request's slot uses no table."""
        if not edits.has_penalties:
            return None
        return self._tables.count_next(task) if stores else counts_before(task)


class LastUpload:
    """Arrays on the device, uploaded again only if they change: a steady decode's do not."""

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


def _has_mask_only(edits: RowEdits) -> bool:
    return edits.allowed is not None and not edits.has_penalties and not edits.has_biases


def padded_edits(
    rows: int, edits: Sequence[RowEdits], seen: Sequence[TokenCounts | None], vocab_size: int
) -> dict[str, Array]:
    """Return the arguments that `adjusted_sample` takes after the arguments of `padded_draws`.

    `seen` has the counts of each row that the device's table lacks.
    """
    penalties = np.zeros((len(PenaltyField), rows), np.float32)
    penalties[:, : len(edits)] = np.array([of_row.penalties for of_row in edits], np.float32).T
    return {
        "penalties": penalties,
        "edits": _padded_columns(joined(edits, seen, vocab_size)),
        **_allowed(rows, edits, vocab_size),
        "resets": padded([counts is not None for counts in seen], rows, 0),
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
