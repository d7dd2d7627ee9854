"""From a batch to device arguments and back.

Arguments by layout, all i64, each followed by `seq_block_ids[rows, B]` and a cache slab per stage:

    prefill   tokens[N,S], [start_positions[N],] seq_lens[N]
    decode    tokens[N,1], seq_lens[N], start_positions[N]
    packed    tokens[T], offsets[R], start_positions[R], seq_lens[R]

The first two are upstream's (`module_abi_version` 1). In the packed one the tasks' tokens lie end to
end: task r's are `tokens[offsets[r]:]`, as many as `seq_lens[r] - start_positions[r]`, and rows past the
last task are padding. Results are logits `[rows, 1 or S, V]`, or values and indices `[rows, 1 or S, K]`,
or those and then logits. A padding row has tokens 0, start 0, seq_len 1 and the scratch page.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.block_tables import BlockTables
from shortfin_apps.llm.components.invocation.buckets import Buckets, Layout, Shape
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.kvcache.base import SCRATCH_PAGE
from shortfin_apps.llm.components.runtime.device import (
    Device,
    DeviceBuffer,
    EntrySignature,
    Program,
    TensorType,
)
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError, InvocationError

Array = npt.NDArray[Any]


class BatchResult:
    """What the device handed back for a batch, row by row; logits are fetched once, when asked for."""

    def __init__(
        self,
        batch: Batch,
        values: Array | None,
        indices: Array | None,
        fetch_logits: Callable[[], Array] | None,
    ) -> None:
        self._tasks = batch.tasks
        self._values = values
        self._indices = indices
        self._fetch_logits = fetch_logits
        self._logits: Array | None = None
        self._holds_nan = values is not None and bool(np.isnan(values.min(initial=0)))

    def row(self, index: int, with_logits: bool) -> Candidates:
        """Row `index`'s candidates; `with_logits` adds its `[V]` logits where the entry returns any.

        Of values among which one is NaN, the first is.
        """
        logits = self._row_of(self._all_logits(), index) if with_logits else None
        if self._values is None or self._indices is None:
            return Candidates(np.empty(0), np.empty(0, np.int64), logits)
        values = self._row_of(self._values, index)
        if self._holds_nan and np.isnan(values).any():
            values = np.full_like(values, np.nan)
        return Candidates(values, self._row_of(self._indices, index), logits)

    def _all_logits(self) -> Array:
        assert self._fetch_logits is not None, "asked for logits of an entry that returns none"
        if self._logits is None:
            self._logits = self._fetch_logits().astype(np.float32, copy=False)
        return self._logits

    def _row_of(self, array: Array, index: int) -> Array:
        last = 0 if array.shape[1] == 1 else len(self._tasks[index].input_tokens) - 1
        row: Array = array[index, last]
        return row


class BatchRunner:
    """Runs batches on one program. Owns the page table (one slab per pipeline stage).

    Not thread-safe; the engine's thread alone calls it.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        config: ModelConfig,
        *,
        page_table: Sequence[DeviceBuffer],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._program = program
        self._config = config
        self._page_table = list(page_table)
        self._clock = clock
        self.buckets = Buckets(program.entries, config.stride, has_position=config.has_prefill_position)
        self.returns_logits = _returns_logits(program.entries[self.buckets.any_decode()], config)
        self._block_tables = BlockTables(device.upload)
        self._counts: defaultdict[str, EntryCounts] = defaultdict(EntryCounts)
        self.device_s = 0.0

    @property
    def num_candidates(self) -> int:
        """K of the entries' top-k; 0 when they return logits only."""
        return self._config.top_k or 0

    @property
    def plan_counts(self) -> PlanCounts:
        return self._block_tables.counts

    def counts(self) -> dict[str, EntryCounts]:
        """What was computed so far, by entry; a copy, for other threads to read."""
        return {entry: counts.copy() for entry, counts in self._counts.items()}

    def run(self, batch: Batch) -> BatchResult:
        """Invokes the nearest entry and waits for it. Raises InvocationError."""
        shape = self.buckets.of(batch)
        block_table = self._block_tables.on_device(batch.tasks, shape.rows, shape.blocks)
        arguments = [*self._upload(shape, batch.tasks), block_table]
        begin = self._clock()
        results = self._program.submit(shape.entry, [*arguments, *self._page_table]).wait()
        result = self._result(batch, results)
        self.device_s += self._clock() - begin
        self._counts[shape.entry].add([len(task.input_tokens) for task in batch.tasks], shape.tokens)
        return result

    def clear_pages(self, page_ids: Collection[int]) -> None:
        """Zeroes pages that may hold NaN, and with them the scratch page, where their rows' padding lies."""
        for slab in self._page_table:
            self._device.clear(slab, [SCRATCH_PAGE, *page_ids])

    def warm_up(self) -> list[EntrySignature]:
        """Runs every entry once on padding rows alone, so that no request pays for first touches.

        Returns the results as they came, as upstream's VMFBs do not declare them. Raises ArtifactError
        when an entry does not take what config.json means.
        """
        return [self._first_run(shape) for shape in self.buckets.smallest_shapes()]

    def _first_run(self, shape: Shape) -> EntrySignature:
        scratch = np.zeros((shape.rows, shape.blocks), np.int64)
        arguments = [*self._upload(shape, ()), self._device.upload(scratch)]
        try:
            results = self._program.submit(shape.entry, [*arguments, *self._page_table]).wait()
        except InvocationError as error:
            raise ArtifactError(
                f"`{shape.entry}` failed in its first run; config.json may belong to another VMFB: check "
                f"`has_prefill_position` and `paged_kv_cache` there ({str(error).splitlines()[0]})"
            ) from error
        return EntrySignature(shape.entry, None, tuple(TensorType(r.shape, r.dtype) for r in results))

    def _upload(self, shape: Shape, tasks: Sequence[LlmTaskInput]) -> list[DeviceBuffer]:
        starts = np.zeros(shape.rows, np.int64)
        seq_lens = np.ones(shape.rows, np.int64)
        for row, task in enumerate(tasks):
            starts[row] = task.start_position
            seq_lens[row] = task.seq_len
        if shape.layout is Layout.PACKED:
            arrays = [*_packed_tokens(shape, tasks), starts, seq_lens]
        elif shape.layout is Layout.DECODE:
            arrays = [_padded_tokens(shape, tasks), seq_lens, starts]
        elif self._config.has_prefill_position:
            arrays = [_padded_tokens(shape, tasks), starts, seq_lens]
        else:
            arrays = [_padded_tokens(shape, tasks), seq_lens]
        return [self._device.upload(array) for array in arrays]

    def _result(self, batch: Batch, results: Sequence[DeviceBuffer]) -> BatchResult:
        download = self._device.download
        if self._config.top_k is None:
            return BatchResult(batch, None, None, lambda: download(results[0]))
        fetch = (lambda: download(results[2])) if len(results) > 2 else None
        return BatchResult(batch, download(results[0]), download(results[1]), fetch)


def _returns_logits(signature: EntrySignature, config: ModelConfig) -> bool:
    if config.top_k is None:
        return True
    return signature.results is not None and len(signature.results) > 2


def _padded_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> Array:
    tokens = np.zeros((shape.rows, shape.tokens // shape.rows), np.int64)
    for row, task in enumerate(tasks):
        tokens[row, : len(task.input_tokens)] = task.input_tokens
    return tokens


def _packed_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> tuple[Array, Array]:
    """`tokens[T]` and `offsets[R]`."""
    tokens = np.zeros(shape.tokens, np.int64)
    offsets = np.zeros(shape.rows, np.int64)
    offset = 0
    for row, task in enumerate(tasks):
        offsets[row] = offset
        tokens[offset : offset + len(task.input_tokens)] = task.input_tokens
        offset += len(task.input_tokens)
    return tokens, offsets
