"""Calls entries, and owns the output buffers of entries that take these as arguments.

The driver queues a call of an entry that allocates only when the device reaches that call. If the entry gets
its output buffers from the caller, its call is queued at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import prod

import numpy as np

from shortfin_apps.llm.components.runtime.device import (
    Device,
    DeviceBuffer,
    EntrySignature,
    Pending,
    Program,
    TensorType,
)
from shortfin_apps.llm.contract.abi import Entry

# Larger results, such as logits, stay on the device, as they are rarely read.
_MOST_HOST_BYTES = 1 << 20
_BYTE = np.dtype(np.int8)

# Calls of an entry with small results that are read late, in one step and in the two steps that may be in
# flight after it. A step draws from at most 256 rows, and has adjusted and other draws.
NUM_LATE_SETS = 8

Results = Sequence[DeviceBuffer]
_Key = str | tuple[TensorType, ...]  # of result buffers: an entry's name, or the types if entries share them


def owned_bytes(program: Program) -> int:
    """Return the bytes of all buffers that an Invoker creates for the program."""
    owned = [signature for signature in program.entries.values() if signature.workspace_bytes is not None]
    sets = [each for signature in owned for each in _sets_of(signature)]
    sizes = {key: count * sum(map(_bytes_of, kinds)) for key, kinds, count in sets}
    return sum(sizes.values()) + _workspace_bytes(program)


class Invoker:
    """Calls the entries of one program.

    Logits and candidates are valid until the next call of an entry that computes any. Token IDs, and the
    results of `logprobs` entries, are valid for NUM_LATE_SETS calls of the same entry, because they are read
    while later invocations are in flight.

    All entries share one workspace, because invocations run one after the other. Entries with results of the
    same types share the buffers of logits and candidates. Buffers are created on an entry's first call and
    kept; `num_bytes` is their total size.
    """

    def __init__(self, device: Device, program: Program) -> None:
        self._device = device
        self._program = program
        self._workspace: DeviceBuffer | None = None
        self._results: dict[str, list[cycle[Results]]] = {}  # by entry, in the order of its results
        self._sets: dict[_Key, cycle[Results]] = {}  # the sets of all entries, by key
        self.num_bytes = 0

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Start `entry` (see `Program.submit`); `wait` of the returned object returns the results."""
        signature = self._program.entries[entry]
        if signature.workspace_bytes is None:
            return self._program.submit(entry, arguments)
        results = self._results_of(signature)
        pending = self._program.submit(entry, [*arguments, *results, self._shared_workspace()])
        return _OwnedPending(pending, results)

    def _results_of(self, signature: EntrySignature) -> Results:
        """Return the buffers that the next call of this entry writes."""
        name = signature.name
        if name not in self._results:
            self._results[name] = [self._sets_for(*each) for each in _sets_of(signature)]
        return [buffer for sets in self._results[name] for buffer in next(sets)]

    def _sets_for(self, key: _Key, kinds: Sequence[TensorType], count: int) -> cycle[Results]:
        if key not in self._sets:
            self._sets[key] = cycle([[self._new_result(kind) for kind in kinds] for _ in range(count)])
        return self._sets[key]

    def _new_result(self, kind: TensorType) -> DeviceBuffer:
        shape, num_bytes = _static_shape(kind), _bytes_of(kind)
        self.num_bytes += num_bytes
        return self._device.allocate(shape, kind.dtype, on_host=num_bytes <= _MOST_HOST_BYTES)

    def _shared_workspace(self) -> DeviceBuffer:
        if self._workspace is None:
            size = _workspace_bytes(self._program)
            self._workspace = self._device.allocate((size,), _BYTE)
            self.num_bytes += size
        return self._workspace


def _sets_of(signature: EntrySignature) -> list[tuple[_Key, tuple[TensorType, ...], int]]:
    """Return the sets of buffers of an entry's results: key, types, and how many are used in turn."""
    assert signature.results is not None, "an entry whose results the caller owns declares them"
    results, entry = signature.results, Entry.parse(signature.name)
    num_late = 0  # results that are read late; they come first
    if entry is not None:
        num_late = int(entry.returns_token_ids) if entry.takes_slabs else len(results)
    late, rows = results[:num_late], results[num_late:]
    sets: list[tuple[_Key, tuple[TensorType, ...], int]] = []
    if late:
        sets.append((signature.name, late, NUM_LATE_SETS))
    return [*sets, (rows, rows, 1)] if rows else sets


def _workspace_bytes(program: Program) -> int:
    return max((signature.workspace_bytes or 0 for signature in program.entries.values()), default=0)


def _static_shape(kind: TensorType) -> tuple[int, ...]:
    shape = tuple(size for size in kind.shape if size is not None)
    assert len(shape) == len(kind.shape), "an entry whose results the caller owns is of static shape"
    return shape


def _bytes_of(kind: TensorType) -> int:
    return prod(_static_shape(kind)) * kind.dtype.itemsize


class _OwnedPending:
    """An invocation in flight that writes its results into buffers of the Invoker."""

    def __init__(self, pending: Pending, results: Results) -> None:
        self._pending = pending
        self._results = results

    def results(self) -> Results:
        return self._results

    def wait(self) -> Results:
        self._pending.wait()
        return self._results
