"""Calls entries, and owns the output buffers of entries that take these as arguments.

The driver queues a call of an entry that allocates only when the device reaches that call. If the entry gets
its output buffers from the caller, its call is queued at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
# flight after it. A step has few calls, as it draws adjusted and other rows, unless it has more rows than the
# entry; then there are more sets.
NUM_LATE_SETS = 8

Results = Sequence[DeviceBuffer]
Types = tuple[TensorType, ...]


def owned_bytes(entries: Mapping[str, EntrySignature]) -> int:
    """Return the bytes of all buffers that an Invoker creates for the entries, but for further late sets."""
    owned = [signature for signature in entries.values() if signature.workspace_bytes is not None]
    late, rows = zip(*map(_parts_of, owned), strict=True) if owned else ((), ())
    num_bytes = NUM_LATE_SETS * sum(map(_set_bytes, late)) + sum(map(_set_bytes, set(rows)))
    return num_bytes + _workspace_bytes(entries)


def result_bytes(signature: EntrySignature) -> int | None:
    """Return the bytes of an entry's results; None if they are undeclared, or depend on the batch."""
    results = signature.results
    if results is None or any(None in kind.shape for kind in results):
        return None
    return _set_bytes(results)


class Invoker:
    """Calls the entries of one program.

    Logits and candidates are valid until the next call of an entry that computes any. Token IDs, and the
    results of `logprobs` entries, are read while later invocations are in flight (late): they are valid until
    the caller has waited for them and calls the same entry again.

    All entries share one workspace, because invocations run one after the other. Entries with results of the
    same types share the buffers of logits and candidates. Buffers are created on an entry's first call and
    kept; `num_bytes` is their total size.
    """

    def __init__(self, device: Device, program: Program) -> None:
        self._device = device
        self._program = program
        self._workspace: DeviceBuffer | None = None
        self._rows: dict[Types, Results] = {}  # logits and candidates
        # By entry: the types of its late results, sets of these for no call in flight, logits and candidates.
        self._owned: dict[str, tuple[Types, deque[Results], Results]] = {}
        self.num_bytes = 0

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        """Start `entry` (see `Program.submit`); `wait` of the returned object returns the results."""
        signature = self._program.entries[entry]
        if signature.workspace_bytes is None:
            return self._program.submit(entry, arguments)
        late_types, free, rows = self._owned.get(entry) or self._first_results(signature)
        late = free.popleft() if free else self._new_set(late_types)
        results = [*late, *rows]
        pending = self._program.submit(entry, [*arguments, *results, self._shared_workspace()])
        return _OwnedPending(pending, results, lambda: free.append(late))

    def _first_results(self, signature: EntrySignature) -> tuple[Types, deque[Results], Results]:
        late_types, row_types = _parts_of(signature)
        if row_types not in self._rows:
            self._rows[row_types] = self._new_set(row_types)
        free = deque(self._new_set(late_types) for _ in range(NUM_LATE_SETS))
        owned = self._owned[signature.name] = late_types, free, self._rows[row_types]
        return owned

    def _new_set(self, kinds: Types) -> Results:
        self.num_bytes += _set_bytes(kinds)
        return [self._new_result(kind) for kind in kinds]

    def _new_result(self, kind: TensorType) -> DeviceBuffer:
        on_host = _bytes_of(kind) <= _MOST_HOST_BYTES
        return self._device.allocate(_static_shape(kind), kind.dtype, on_host=on_host)

    def _shared_workspace(self) -> DeviceBuffer:
        if self._workspace is None:
            size = _workspace_bytes(self._program.entries)
            self._workspace = self._device.allocate((size,), _BYTE)
            self.num_bytes += size
        return self._workspace


def _parts_of(signature: EntrySignature) -> tuple[Types, Types]:
    """Return the types of an entry's late results, which come first, and of its logits and candidates."""
    results, entry = signature.results, Entry.parse(signature.name)
    assert results is not None, "an entry whose results the caller owns declares them"
    num_late = 0
    if entry is not None:
        num_late = int(entry.returns_token_ids) if entry.takes_slabs else len(results)
    return results[:num_late], results[num_late:]


def _workspace_bytes(entries: Mapping[str, EntrySignature]) -> int:
    return max((signature.workspace_bytes or 0 for signature in entries.values()), default=0)


def _static_shape(kind: TensorType) -> tuple[int, ...]:
    shape = tuple(size for size in kind.shape if size is not None)
    assert len(shape) == len(kind.shape), "an entry whose results the caller owns is of static shape"
    return shape


def _bytes_of(kind: TensorType) -> int:
    return prod(_static_shape(kind)) * kind.dtype.itemsize


def _set_bytes(kinds: Types) -> int:
    return sum(map(_bytes_of, kinds))


class _OwnedPending:
    """An invocation in flight that writes its results into buffers of the Invoker.

    The first `wait` calls `on_read`, as the caller then reads the results.
    """

    def __init__(self, pending: Pending, results: Results, on_read: Callable[[], None]) -> None:
        self._pending = pending
        self._results = results
        self._on_read: Callable[[], None] | None = on_read

    def results(self) -> Results:
        return self._results

    def wait(self) -> Results:
        try:
            self._pending.wait()
        finally:  # a call that failed is over, too
            if self._on_read is not None:
                self._on_read()
                self._on_read = None
        return self._results
