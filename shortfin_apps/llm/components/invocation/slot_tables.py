"""The device's tables by slot (abi.py).

They have the last token of each running request, its drafted and chosen tokens, counts of its tokens and, for
a draft layer, its last hidden states (hidden_rows.py). The device updates tokens and counts when it draws.
The host only remembers which tokens are counted. It passes all counts of a row to a draw if the table has
others: at the first draw of a request, after tokens that the device did not draw, and after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.hidden_rows import hidden_rows
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import TokenCounts
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, EntrySignature, TensorType
from shortfin_apps.llm.contract.abi import (
    Entry,
    Layout,
    argument_names,
    chosen_place,
    drafted_place,
    hidden_row,
    num_places,
)

Entries = Mapping[str, EntrySignature]
SLOT_TABLES = ("last_tokens", "counts")  # argument names of the tables that draws update


def table_bytes(entries: Entries, num_slots: int) -> int:
    """Return the bytes of the tables that the entries of a program need."""
    types = _table_types(entries, num_slots).values()
    return sum(prod(size or 0 for size in kind.shape) * kind.dtype.itemsize for kind in types)


class SlotTables:
    """The tables of one program, with a single slot until `resize`. `buffers` has them by argument name."""

    def __init__(self, device: Device, entries: Entries) -> None:
        self._device = device
        self._entries = entries
        # By slot: the lease of the request with counted tokens, and their number once the draws in flight are
        # over. Each start of a request has a separate lease.
        self._counted: dict[int, tuple[Lease, int]] = {}
        self.buffers: dict[str, DeviceBuffer] = {}
        self.resize(1)

    def resize(self, num_slots: int) -> None:
        """Replace the tables by new ones."""
        self.forget()
        self._num_slots = num_slots
        self.buffers = {
            name: self._device.allocate(_static(kind.shape), kind.dtype, only_dispatches=True)
            for name, kind in _table_types(self._entries, num_slots).items()
        }

    def use_tokens_of(self, other: SlotTables) -> None:
        """Have the tokens in the table of another program, whose requests have the same slots."""
        self.buffers["last_tokens"], self._num_slots = other.buffers["last_tokens"], other._num_slots

    @property
    def vocab_size(self) -> int:
        """Number of counts per slot; callers must check that there are any."""
        return self.buffers["counts"].shape[-1]

    def drafted_place(self, slot: int, position: int) -> int:
        """Return the place in `last_tokens` of a drafted token."""
        return drafted_place(self._num_slots, slot, position)

    def chosen_places(self, tasks: Sequence[LlmTaskInput]) -> list[int]:
        """Return the places in `last_tokens` of the tokens after these tasks; none without a draft layer."""
        if "hidden_states" not in self.buffers:
            return []
        return [chosen_place(self._num_slots, task.request.slot, task.seq_len) for task in tasks]

    def hidden_rows(self, tasks: Sequence[LlmTaskInput], rows: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return the rows of hidden states that an invocation reads and writes (hidden_rows.py)."""
        found = hidden_rows(tasks, rows)
        num_rows = self.buffers["hidden_states"].shape[0]
        assert found["hidden_to"].max() < num_rows, "the device does not check where it writes"
        return found

    def count_next(self, task: LlmTaskInput) -> TokenCounts | None:
        """Note that the device is about to draw the token after `task`, and to count it.

        Returns the counts of all tokens up to the task's if the table has others; the draw must set these.
        The host then knows the tokens, because only draws that are counted are queued ahead of it.
        """
        request, lease = task.request, task.request.lease
        assert lease is not None, "only running requests have tasks"
        of_lease, num_counted = self._counted.get(request.slot, (None, 0))
        self._counted[request.slot] = lease, task.seq_len + 1
        is_counted = of_lease is lease and num_counted == task.seq_len
        return None if is_counted else counts_before(task)

    def forget(self) -> None:
        """Give all counts anew, after an invocation has failed: it may not have counted its tokens."""
        self._counted.clear()


def counts_before(task: LlmTaskInput) -> TokenCounts:
    """Return the counts of the tokens up to the task's, which must be all that the host knows."""
    request = task.request
    assert len(request.token_ids) == task.seq_len, "the next token is drawn once"
    request.token_counts.catch_up(request.token_ids)
    return request.token_counts


def _table_types(entries: Entries, num_slots: int) -> dict[str, TensorType]:
    """Return the types of the tables, by argument name; those after the first if an entry takes them."""
    types = {"last_tokens": TensorType((num_places(num_slots),), np.dtype(np.int64))}
    for name, signature in entries.items():
        entry = Entry.parse(name)
        if entry is None or signature.arguments is None:
            continue
        if entry.layout() is Layout.ADJUSTED_SAMPLE:
            arguments = dict(zip(argument_names(entry.layout()), signature.arguments, strict=True))
            counts = arguments["counts"]
            types["counts"] = TensorType((num_slots, counts.shape[-1]), counts.dtype)
        elif entry.layout() is Layout.DRAFT:
            hidden = next(each for each in signature.arguments if each.dtype == np.float32)  # before slabs
            types["hidden_states"] = TensorType((hidden_row(num_slots, 0), hidden.shape[-1]), hidden.dtype)
    return types


def _static(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the shape of a table; the compiler knows the size of the vocabulary."""
    sizes = tuple(size for size in shape if size is not None)
    assert len(sizes) == len(shape), "the vocabulary has a size"
    return sizes
