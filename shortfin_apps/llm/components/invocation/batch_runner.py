"""Runs batches on a program: converts tasks to an entry's arguments (abi.py), and its results to rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput, Paged
from shortfin_apps.llm.components.invocation.block_tables import BlockTables
from shortfin_apps.llm.components.invocation.buckets import Buckets, Shape
from shortfin_apps.llm.components.invocation.decode_loop import DecodeLoop, padded_state
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.invocation.invoker import Invoker
from shortfin_apps.llm.components.invocation.row_draws import RowDraw, padded_draws, padded_edits
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Invocation, Loop, Run, Step
from shortfin_apps.llm.components.recorder.row_checks import Fetched, logits_sum
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import (
    Device,
    DeviceBuffer,
    EntrySignature,
    Pending,
    Program,
    TensorType,
)
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.contract.abi import (
    BLOCK_TABLES,
    Entry,
    EntryFamily,
    Layout,
    argument_names,
    named_results,
)
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError, InvocationError

Array = npt.NDArray[Any]


class BatchResult:
    """Results of one batch, one row per task; logits are copied to the host on first use.

    `on_device` has all results by name, valid until the next batch runs.
    """

    def __init__(
        self,
        batch: Batch,
        values: Array | None,
        indices: Array | None,
        fetch_logits: Callable[[], Array] | None,
        on_device: Mapping[str, DeviceBuffer] | None = None,
    ) -> None:
        self.on_device = on_device or {}
        self._tasks = batch.tasks
        self._values = values
        self._indices = indices
        self._fetch_logits = fetch_logits
        self._logits: Array | None = None
        self._record: Run | None = None
        self._holds_nan = values is not None and bool(np.isnan(values.min(initial=0)))

    def row(self, index: int, with_logits: bool) -> Candidates:
        """Return row `index`'s candidates; `with_logits` adds the logits `[V]`, which the entry must return.

        If any value is NaN, all values are set to NaN: programs of other compilers may not sort NaN first.
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
            if self._record is not None:
                rows = range(len(self._tasks))
                self._record.logits = [logits_sum(self._row_of(self._logits, row)) for row in rows]
        return self._logits

    def note(self, record: Run) -> Fetched | None:
        """Return the fetched values and indices; `record` also gets checksums of logits fetched later."""
        self._record = record
        if self._values is None or self._indices is None:
            return None
        values, indices = self._last_rows(self._values), self._last_rows(self._indices)
        return Fetched(values, indices, len(self._tasks), self._holds_nan)

    def _last_rows(self, array: Array) -> Array:
        """Return the last token row of each task as `[N or more, 1, K]`, the rows that `_row_of` returns."""
        if array.shape[1] == 1:
            return array
        last = [len(task.token_ids) - 1 for task in self._tasks]
        rows: Array = array[np.arange(len(last)), last][:, None]
        return rows

    def _row_of(self, array: Array, index: int) -> Array:
        last = 0 if array.shape[1] == 1 else len(self._tasks[index].token_ids) - 1
        row: Array = array[index, last]
        return row


class BatchRunner:
    """Runs batches on one program, in three steps: plan the arguments, invoke the entry, fetch the results.

    Owns the page table: the slabs of the config. Not thread-safe: only the engine's thread may call.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        config: ModelConfig,
        *,
        page_table: Sequence[DeviceBuffer],
        clock: Callable[[], float] = time.perf_counter,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._device = device
        self._recorder = recorder
        self._entries = program.entries
        self._invoker = Invoker(device, program)
        self._page_table = list(page_table)
        self._slabs = config.slabs
        self._top_k = config.top_k
        self.num_candidates = config.top_k or 0  # K of the entries' top-k; 0 if they return logits only
        self.stride = config.stride  # tokens per page
        self._clock = clock
        has_position = config.has_prefill_position
        self._has_window_table = config.has_window_table
        self.buckets = Buckets(program.entries, config.stride, has_prefill_position=has_position)
        self.returns_logits = _returns_logits(program, config)
        self._argument_names = {
            layout: argument_names(
                layout, has_prefill_position=has_position, has_windows=config.has_window_table
            )
            for layout in Layout
        }
        self._block_tables = BlockTables(self._upload)
        self._window_tables = BlockTables(self._upload)
        self._counts: defaultdict[str, EntryCounts] = defaultdict(EntryCounts)
        self._copied_counts: dict[str, EntryCounts] = {}
        self._ran: set[str] = set()  # entries that ran since their counts were copied
        self.device_s = 0.0
        self.num_uploads = 0  # arrays copied to the device

    @property
    def plan_counts(self) -> PlanCounts:
        return self._block_tables.counts

    def counts(self) -> dict[str, EntryCounts]:
        """Return a copy of the counts of all invocations by entry; other threads may read the copy."""
        self._copied_counts |= {entry: self._counts[entry].copy() for entry in self._ran}
        self._ran.clear()
        return self._copied_counts.copy()

    def run(self, batch: Batch, meanwhile: Callable[[], None] = lambda: None) -> BatchResult:
        """Invoke the nearest entry and wait for the results. Raises InvocationError.

        Calls `meanwhile` after the entry is queued and before waiting.
        """
        shape = self.buckets.nearest(batch)
        if self._recorder is None:
            return self._run(shape, batch, meanwhile)
        record = self._recorder.run(shape.entry, shape.blocks, batch)
        try:
            result = self._run(shape, batch, meanwhile)
        except BaseException as error:
            self._recorder.ended(record, error)
            raise
        self._recorder.fetched(record, result.note(record))
        return result

    def _run(self, shape: Shape, batch: Batch, meanwhile: Callable[[], None]) -> BatchResult:
        arguments = self._plan(shape, batch.tasks, self._tables(batch.tasks, shape))
        begin = self._clock()
        pending = self._invoker.submit(shape.entry, arguments)
        try:
            meanwhile()
        finally:
            results = pending.wait()
        result = self._fetch(batch, results)
        self.device_s += self._clock() - begin
        self._count(shape, [len(task.token_ids) for task in batch.tasks])
        return result

    def run_as(self, shape: Shape, batch: Batch) -> BatchResult:
        """Invoke `shape`, which must hold the batch, without counting. Raises InvocationError."""
        arguments = self._plan(shape, batch.tasks, self._tables(batch.tasks, shape))
        return self._fetch(batch, self._invoke(shape.entry, arguments))

    def download_pages(self) -> list[Array]:
        """Return a copy of each slab [pages, elements]; meant for page tables of a few pages."""
        return [self._device.download(slab) for slab in self._page_table]

    def draw(self, result: BatchResult, draws: Sequence[RowDraw]) -> list[int]:
        """Draw token IDs on the device from full rows of `result`, which must be the last batch's.

        Callers must check that `buckets` has `sample` entries, or `adjusted_sample` if the draws have edits;
        all draws must have edits, or none. The token ID is -1 if the row's best logit is not finite. Raises
        InvocationError.
        """
        token_ids: list[int] = []
        while len(token_ids) < len(draws):
            token_ids += self._draw_some(result, draws[len(token_ids) :])
        return token_ids

    def _draw_some(self, result: BatchResult, draws: Sequence[RowDraw]) -> list[int]:
        """Draw for as many leading draws as one entry takes."""
        is_adjusted = draws[0].edits is not None
        shape = (self.buckets.adjusted_sample if is_adjusted else self.buckets.sample)(len(draws))
        taken = draws[: shape.rows]
        arrays = padded_draws(shape.rows, taken)
        if is_adjusted:
            edits = [draw.edits for draw in taken if draw.edits is not None]
            arrays |= padded_edits(shape.rows, edits, result.on_device["logits"].shape[-1])
        if self._recorder is None:
            return self.draw_by(result, shape, arrays, len(taken))
        record = self._recorder.draw(shape.entry, arrays, len(taken))
        with self._noting(record):
            record.token_ids = drawn = self.draw_by(result, shape, arrays, len(taken))
        return drawn

    def draw_by(
        self, result: BatchResult, shape: Shape, arrays: Mapping[str, Array], num_draws: int
    ) -> list[int]:
        """Run the sampling entry of `shape` on `arrays`; return the first `num_draws` token IDs."""
        begin = self._clock()
        arguments = {**result.on_device, **{name: self._upload(array) for name, array in arrays.items()}}
        [token_ids] = self._invoke(
            shape.entry, [arguments[name] for name in self._argument_names[shape.layout]]
        )
        drawn: list[int] = self._device.download(token_ids)[:num_draws].tolist()
        self.device_s += self._clock() - begin
        self._count(shape, [])
        return drawn

    def start_loop(self, batch: Batch, sampling: Sequence[Sequence[int]]) -> DecodeLoop | None:
        """Create a decode loop for the batch; `sampling` has each task's values by SamplingField.

        Returns None if the VMFB has no decode loop with enough rows, or if the nearest `extend` would compute
        less than three quarters of the loop's rows.
        """
        tasks = batch.tasks
        requests = [task.request for task in tasks]
        if (shape := self.buckets.decode_loop(requests)) is None:
            return None
        if batch.family is EntryFamily.EXTEND and 4 * self.buckets.extend(tasks).tokens < 3 * shape.rows:
            return None
        state = padded_state(shape.rows, tasks, sampling)
        on_device = {name: self._upload(array) for name, array in state.items()}
        loop = None if self._recorder is None else self._recorder.loop(tasks, sampling)
        return DecodeLoop(requests, on_device, self.stride, partial(self._step, loop, count()))

    def _step(
        self,
        loop: Loop | None,
        indices: Iterator[int],
        requests: Sequence[Request],
        state: Mapping[str, DeviceBuffer],
    ) -> Callable[[], Array]:
        """Queue one step of a decode loop; the returned function waits for the step's token IDs `[rows]`."""
        if self._recorder is None or loop is None:
            return partial(self._token_ids, self._queue(requests, state))
        shape = self.buckets.decode_loop(requests)
        assert shape is not None, "the loop was started on this program"
        record = self._recorder.step(shape.entry, loop, next(indices), requests)
        try:
            pending = self._queue(requests, state)
        except BaseException as error:
            self._recorder.ended(record, error)
            raise
        return partial(self._noted_token_ids, record, len(requests), pending)

    def _queue(self, requests: Sequence[Request], state: Mapping[str, DeviceBuffer]) -> Pending:
        shape = self.buckets.decode_loop(requests)
        assert shape is not None, "the loop was started on this program"
        begin = self._clock()
        arguments = {**state, **self._tables(requests, shape)}
        names = self._argument_names[Layout.LOOP]
        pending = self._invoker.submit(shape.entry, [*(arguments[name] for name in names), *self._page_table])
        self.device_s += self._clock() - begin
        self._count(shape, [1] * len(requests))
        return pending

    def _tables(self, tasks: Sequence[Paged], shape: Shape) -> dict[str, DeviceBuffer]:
        """Return the tasks' block tables on the device, by argument name."""
        size = shape.rows, shape.blocks
        page_lists = [task.page_ids for task in tasks]
        window_lists = [task.window_page_ids or () for task in tasks]
        if not self._has_window_table:
            only = page_lists if self._slabs[0].pool == "whole" else window_lists
            return {"seq_block_ids": self._block_tables.on_device(only, *size)}
        return {
            "seq_block_ids": self._block_tables.on_device(page_lists, *size),
            "window_block_ids": self._window_tables.on_device(window_lists, *size),
        }

    def _count(self, shape: Shape, lengths: Sequence[int]) -> None:
        self._counts[shape.entry].add(lengths, shape.tokens)
        self._ran.add(shape.entry)

    def _token_ids(self, pending: Pending) -> Array:
        begin = self._clock()
        token_ids = self._device.download(pending.wait()[0])
        self.device_s += self._clock() - begin
        return token_ids

    def _noted_token_ids(self, record: Step, num_rows: int, pending: Pending) -> Array:
        with self._noting(record):
            token_ids = self._token_ids(pending)
            record.token_ids = token_ids[:num_rows].tolist()
        return token_ids

    @contextmanager
    def _noting(self, record: Invocation) -> Iterator[None]:
        """Complete `record` when the `with` block, which runs the invocation, ends or fails."""
        assert self._recorder is not None, "it made the record"
        try:
            yield
        except BaseException as error:
            self._recorder.ended(record, error)
            raise
        self._recorder.ended(record)

    def _upload(self, array: Array) -> DeviceBuffer:
        self.num_uploads += 1
        return self._device.upload(array)

    def clear_pages(self, page_ids: Collection[int], window_page_ids: Collection[int] = ()) -> None:
        """Zero pages that may hold NaN, and each slab's scratch page, which padding rows wrote."""
        if self._recorder is None:
            self._clear(page_ids, window_page_ids)
            return
        with self._noting(self._recorder.clear(page_ids, window_page_ids)):
            self._clear(page_ids, window_page_ids)

    def clear_suspects(self, cache: KVCache) -> None:
        """Zero released pages that may hold NaN; call before an invocation can write or read these pages."""
        if cache.has_suspects:
            self.clear_pages(cache.suspects, cache.window_suspects)
            cache.suspects.clear()
            cache.window_suspects.clear()

    def _clear(self, page_ids: Collection[int], window_page_ids: Collection[int]) -> None:
        for slab, pages in zip(self._slabs, self._page_table, strict=True):
            cleared = page_ids if slab.pool == "whole" else window_page_ids
            self._device.clear(pages, [SCRATCH_PAGE, *cleared])

    @property
    def num_bytes(self) -> int:
        """Bytes of the page table, and of the results and workspace of entries that do not allocate these."""
        table = sum(prod(slab.shape) * slab.dtype.itemsize for slab in self._page_table)
        return table + self._invoker.num_bytes

    def warm_up(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[EntrySignature]:
        """Run every entry once on padding rows, so that first touches of memory delay no request.

        Returns a signature per entry with the types of the actual results; upstream's VMFBs declare no types.
        Calls `on_progress` with the number of entries done and the total. Raises ArtifactError if an entry
        does not accept the arguments that config.json describes.
        """
        shapes = self.buckets.smallest_shapes()
        found: list[EntrySignature] = []
        for shape in shapes:
            on_progress(len(found), len(shapes))
            found.append(self._first_run(shape))
        on_progress(len(shapes), len(shapes))
        return found

    def decode_s(self, num_runs: int) -> float:
        """Return the duration of the smallest `decode`, in seconds."""
        shape = next(each for each in self.buckets.smallest_shapes() if each.layout is Layout.DECODE)
        return self.shape_s(shape, num_runs)

    def shape_s(self, shape: Shape, num_runs: int) -> float:
        """Return the shortest duration of `num_runs` warm invocations on padding rows, in seconds."""
        arguments, taken = self._first_arguments(shape), []
        for _ in range(num_runs):
            begin = self._clock()
            self._invoke(shape.entry, arguments)
            taken.append(self._clock() - begin)
        return min(taken)

    def _first_run(self, shape: Shape) -> EntrySignature:
        try:
            results = self._invoke(shape.entry, self._first_arguments(shape))
        except DeviceLostError as error:
            raise ArtifactError(f"`{shape.entry}` failed in its first run: {error}") from error
        except InvocationError as error:
            reason = str(error).partition("\n")[0]
            raise ArtifactError(
                f"`{shape.entry}` failed in its first run; config.json may belong to another VMFB: check "
                f"`has_prefill_position` and `paged_kv_cache` there ({reason})"
            ) from error
        return EntrySignature(shape.entry, None, tuple(TensorType(r.shape, r.dtype) for r in results))

    def _first_arguments(self, shape: Shape) -> list[DeviceBuffer]:
        """Return arguments of `shape` that have only padding rows."""
        if shape.layout in (Layout.SAMPLE, Layout.ADJUSTED_SAMPLE):
            types = self._entries[shape.entry].arguments or ()
            return [self._device.upload(np.zeros([size or 1 for size in t.shape], t.dtype)) for t in types]
        scratch = self._device.upload(np.zeros((shape.rows, shape.blocks), np.int64))
        return self._plan(shape, (), dict.fromkeys(BLOCK_TABLES, scratch))

    def _plan(
        self, shape: Shape, tasks: Sequence[LlmTaskInput], tables: Mapping[str, DeviceBuffer]
    ) -> list[DeviceBuffer]:
        """Return all arguments of the entry, on the device."""
        arrays = _padded_arrays(shape, tasks)
        arguments = [
            tables[name] if name in tables else self._upload(arrays[name])
            for name in self._argument_names[shape.layout]
        ]
        return [*arguments, *self._page_table]

    def _invoke(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Sequence[DeviceBuffer]:
        return self._invoker.submit(entry, arguments).wait()

    def _fetch(self, batch: Batch, results: Sequence[DeviceBuffer]) -> BatchResult:
        """Copy values and indices to the host; logits stay on the device until a row's logits are needed."""
        download, found = self._device.download, named_results(results, self._top_k)
        values, indices = (download(found[name]) if name in found else None for name in ("values", "indices"))
        fetch_logits = (lambda: download(found["logits"])) if "logits" in found else None
        return BatchResult(batch, values, indices, fetch_logits, found)


def _returns_logits(program: Program, config: ModelConfig) -> bool:
    """Return whether every entry returns logits; with top-k, entries must declare them in their results."""
    if config.top_k is None:
        return True
    parsed = ((Entry.parse(name), signature) for name, signature in program.entries.items())
    return all(
        "logits" in named_results(signature.results or (), config.top_k)
        for entry, signature in parsed
        if entry is not None and not entry.returns_token_ids
    )


def _padded_arrays(shape: Shape, tasks: Sequence[LlmTaskInput]) -> dict[str, Array]:
    """Return the tasks' tokens and positions by argument name, padded to the shape."""
    starts = np.zeros(shape.rows, np.int64)
    seq_lens = np.ones(shape.rows, np.int64)
    for row, task in enumerate(tasks):
        starts[row] = task.start_position
        seq_lens[row] = task.seq_len
    arrays = {"start_positions": starts, "seq_lens": seq_lens}
    if shape.layout is Layout.LOOP:
        arrays |= padded_state(shape.rows, (), ())
    elif shape.layout is Layout.PACKED:
        arrays["tokens"], arrays["offsets"] = _packed_tokens(shape, tasks)
    else:
        arrays["tokens"] = _padded_tokens(shape, tasks)
    return arrays


def _padded_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> Array:
    tokens = np.zeros((shape.rows, shape.tokens // shape.rows), np.int64)
    for row, task in enumerate(tasks):
        tokens[row, : len(task.token_ids)] = task.token_ids
    return tokens


def _packed_tokens(shape: Shape, tasks: Sequence[LlmTaskInput]) -> tuple[Array, Array]:
    """Return the arguments `tokens[T]` and `offsets[R]` of a packed `extend`."""
    tokens = np.zeros(shape.tokens, np.int64)
    offsets = np.zeros(shape.rows, np.int64)
    offset = 0
    for row, task in enumerate(tasks):
        offsets[row] = offset
        tokens[offset : offset + len(task.token_ids)] = task.token_ids
        offset += len(task.token_ids)
    return tokens, offsets
