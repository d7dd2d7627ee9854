"""Runs batches on a program: converts tasks to an entry's arguments (abi.py), and its results to rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_result import BatchResult
from shortfin_apps.llm.components.invocation.block_tables import BlockTables
from shortfin_apps.llm.components.invocation.buckets import Buckets, Shape, all_return_logits, widest
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, TableCounts, counts_of
from shortfin_apps.llm.components.invocation.invoker import Invoker
from shortfin_apps.llm.components.invocation.launch import DrawLaunch, Launch, LogprobsLaunch
from shortfin_apps.llm.components.invocation.loop_state import (
    Call,
    Fields,
    LoopState,
    padded,
    padded_sampling,
)
from shortfin_apps.llm.components.invocation.padded_tasks import padded_arrays, state_pages
from shortfin_apps.llm.components.invocation.row_draws import DrawArguments, LastUpload, padded_logprobs
from shortfin_apps.llm.components.invocation.slot_tables import SLOT_TABLES, SlotTables
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import NOT_FINITE_ROW, Invocation, Loop, Run, Step
from shortfin_apps.llm.components.runtime.device import (
    Device,
    DeviceBuffer,
    Pending,
    Program,
)
from shortfin_apps.llm.components.sampling.candidates import LogprobTerms
from shortfin_apps.llm.components.sampling.logprobs import computed_terms
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.contract.abi import (
    BLOCK_TABLES,
    DRAFTED,
    GIVEN,
    LOOP_LAYOUTS,
    ROW_LAYOUTS,
    Entry,
    EntryFamily,
    Layout,
    argument_names,
)
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import InvocationError

Array = npt.NDArray[Any]


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
        self.clock = clock
        has_position = config.has_prefill_position
        self._has_window_table = config.has_window_table
        self.buckets = Buckets(program.entries, config.stride, has_prefill_position=has_position)
        self.returns_logits = all_return_logits(program.entries, config.top_k)
        self._argument_names = {
            layout: argument_names(
                layout,
                has_prefill_position=has_position,
                has_windows=config.has_window_table,
                takes_followers=self.buckets.takes_followers,
                takes_hidden=self.buckets.most_drafts > 0,
            )
            for layout in Layout
        }
        self.slots = SlotTables(device, program.entries)  # callers must set their size
        self._loop = LoopState(self._upload, takes_hidden=self.buckets.most_drafts > 0)
        self._recorded_loop: Loop | None = None
        self._draw_arguments = DrawArguments(self._upload, self.slots)
        self._logprob_arguments = LastUpload(self._upload)
        self._block_tables = BlockTables(self._upload)
        self._window_tables = BlockTables(self._upload)
        self._counts = counts_of(program.entries)
        self._copied_counts: dict[str, EntryCounts] = {}
        self._ran: set[str] = set()  # entries that ran since their counts were copied
        self.device_s = 0.0
        self.num_uploads = 0  # arrays copied to the device

    @property
    def table_counts(self) -> TableCounts:
        return self._block_tables.counts

    def counts(self) -> dict[str, EntryCounts]:
        """Return a copy of the counts of all invocations by entry; other threads may read the copy."""
        self._copied_counts |= {entry: self._counts[entry].copy() for entry in self._ran}
        self._ran.clear()
        return self._copied_counts.copy()

    def run(self, batch: Batch) -> BatchResult:
        """Invoke the nearest entry and wait for the results. Raises InvocationError."""
        return self.result(self.launch(batch))

    def launch(
        self, batch: Batch, fields: Fields | None = None, slots: Sequence[int] | None = None
    ) -> Launch:
        """Queue the nearest entry for the batch.

        With `fields`, decodes run on a decode loop, which also draws a token for each task with these
        sampling fields, and stores it in its slot of the token table (None: the request's slot).
        """
        begin = self.clock()
        shape, arguments = self._loop.following(batch) or self._call(batch, fields, slots)
        record = self._record(shape, batch)
        pending = self._submit(shape.entry, arguments, record)
        self.device_s += self.clock() - begin
        self._count(shape, [len(task.token_ids) for task in batch.tasks])
        return Launch(batch, shape, pending, record)

    def launch_drafts(
        self, tasks: Sequence[LlmTaskInput], num_rounds: int, fields: Fields, checked: Sequence[int] = ()
    ) -> Iterator[Launch]:
        """Queue, one by one, rounds of the draft layer: each drafts one token for every task's request.

        A task has the last known token; with `checked`, one number for each task as in abi.py, it has the
        first token of the last batch instead, and reaches to the last token that may turn out to be right.
        """
        begin = self.clock()
        last = max(task.seq_len for task in tasks) + num_rounds - 1
        shape = self.buckets.draft(len(tasks), max(widest(tasks), -(-last // self.stride)))
        sampling = padded_sampling([fields(task.request) for task in tasks], shape.rows)
        given = {"checked": padded(checked, shape.rows, GIVEN), "sampling": sampling}
        arguments = self._on_device(shape, tasks, {n: self._upload(array) for n, array in given.items()})
        for number in range(num_rounds):
            if number == 1:
                drafted = self._upload(padded([DRAFTED] * len(tasks), shape.rows, GIVEN))
                names = self._argument_names[Layout.DRAFT]
                arguments = [drafted if n == "checked" else a for n, a in zip_longest(names, arguments)]
            pending = self._submit(shape.entry, arguments, None)
            self.device_s += self.clock() - begin
            self._count(shape, [1] * len(tasks))
            yield Launch(Batch(EntryFamily.DRAFT, tuple(tasks)), shape, pending)
            begin = self.clock()

    def _call(self, batch: Batch, fields: Fields | None, slots: Sequence[int] | None) -> Call:
        """Return the nearest shape and the arguments of its entry, on the device."""
        shape = self.buckets.nearest(batch, draws=fields is not None)
        if fields is None or shape.layout is not Layout.LOOP:
            return shape, self._on_device(shape, batch.tasks)
        state = self._loop.on_device(batch.tasks, shape.rows, fields, slots)
        call = shape, self._on_device(shape, batch.tasks, state)
        self._loop.keep(batch, call)
        return call

    def _record(self, shape: Shape, batch: Batch) -> Run | Step | None:
        if self._recorder is None:
            return None
        if shape.layout is not Layout.LOOP:
            return self._recorder.run(shape.entry, shape.blocks, batch)
        if self._loop.index == 0 or self._recorded_loop is None:
            self._recorded_loop = self._recorder.loop(batch.tasks, self._loop.sampling)
        requests = [task.request for task in batch.tasks]
        return self._recorder.step(shape.entry, self._recorded_loop, self._loop.index, requests)

    def _submit(self, entry: str, arguments: Sequence[DeviceBuffer], record: Invocation | None) -> Pending:
        try:
            return self._invoker.submit(entry, arguments)
        except BaseException as error:
            self._ended(record, error)
            raise

    def _ended(self, record: Invocation | None, error: BaseException | None = None) -> None:
        """Complete a record, if there is one."""
        if record is not None and self._recorder is not None:
            self._recorder.ended(record, error)

    def wait(self, launch: Launch) -> list[int] | None:
        """Wait for a batch. Returns the token of each task if a decode loop or a draft drew it, else None.

        A token is -1 if its row is not finite. Raises InvocationError.
        """
        with self._completing(launch.record):
            results = launch.pending.wait()
            if launch.shape.layout not in LOOP_LAYOUTS:
                return None
            drawn = self._token_ids(results[0], len(launch.batch.tasks))
            if isinstance(launch.record, Step):
                launch.record.token_ids = drawn
        return drawn

    def result(self, launch: Launch) -> BatchResult:
        """Wait for a batch, and fetch its candidates. Raises InvocationError.

        Callers must not have launched another batch since, because it would overwrite the results.
        """
        with self._completing(launch.record):
            result = self._fetch(launch.batch, self._named(launch.shape, launch.pending.wait()))
        if self._recorder is not None and isinstance(launch.record, Run):
            self._recorder.fetched(launch.record, result.note(launch.record))
        return result

    def drawn(self, launch: DrawLaunch) -> list[int]:
        """Wait for a sampling entry's tokens; -1 for rows that are not finite. Raises InvocationError."""
        with self._completing(launch.record):
            token_ids = self._token_ids(launch.pending.wait()[0], len(launch.rows))
            if launch.record is not None:
                launch.record.token_ids = token_ids
        return token_ids

    def terms(self, launch: LogprobsLaunch) -> list[LogprobTerms]:
        """Wait for a `logprobs` entry, and return the terms of its rows. Raises InvocationError."""
        with self._completing(launch.record):
            results = [self._device.download(each) for each in launch.pending.wait()]
            found = computed_terms(*results)[: len(launch.rows)]
            if launch.record is not None:
                launch.record.masses = [terms.mass if terms.is_finite else NOT_FINITE_ROW for terms in found]
        return found

    def results_in_flight(self, launch: Launch) -> dict[str, DeviceBuffer]:
        """Return the batch's results by name, for draws that are queued before the batch is over."""
        return self._named(launch.shape, launch.pending.results())

    def abandon(self, launch: Launch | DrawLaunch | LogprobsLaunch, *, waits: bool = True) -> None:
        """Give up an invocation after another one failed: wait for it, unless the device may not answer."""
        if waits:
            with suppress(Exception):  # the caller already knows that something failed
                launch.pending.wait()
        if launch.record is not None and launch.record.ended_s is None:
            self._ended(launch.record, InvocationError("given up, as another invocation had failed"))

    def forget_state(self) -> None:
        """Upload the state of decode loops and draws again, after an invocation has failed."""
        self._loop.forget()
        self._draw_arguments.forget()

    def _token_ids(self, buffer: DeviceBuffer, rows: int) -> list[int]:
        token_ids: list[int] = self._device.download(buffer)[:rows].tolist()
        return token_ids

    @contextmanager
    def _completing(self, record: Invocation | None) -> Iterator[None]:
        """Count the time of the `with` block as device time, and complete the record, if there is one."""
        begin = self.clock()
        try:
            yield
        except BaseException as error:
            self._ended(record, error)
            raise
        finally:
            self.device_s += self.clock() - begin
        self._ended(record)

    def run_as(self, shape: Shape, batch: Batch) -> BatchResult:
        """Invoke `shape`, which must hold the batch, without counting. Raises InvocationError."""
        results = self.invoke_entry(shape.entry, self._on_device(shape, batch.tasks))
        return self._fetch(batch, self._named(shape, results))

    def invoke(
        self,
        shape: Shape,
        tasks: Sequence[LlmTaskInput],
        arrays: Mapping[str, Array],
        left: Mapping[str, DeviceBuffer] | None = None,
    ) -> dict[str, Array]:
        """Run the entry of `shape` on these arguments, by name, and the pages of `tasks`, without counting.

        `left`: results of another entry that this one reads. Returns the entry's results by name, and its
        tables by slot as they are afterwards. Raises InvocationError.
        """
        entry = Entry.parse(shape.entry)
        assert entry is not None, "a shape names an entry"
        on_device = {name: self._upload(array) for name, array in arrays.items()} | dict(left or {})
        if entry.takes_slabs:
            hidden = {name: self._upload(array) for name, array in self._hidden(shape, tasks).items()}
            on_device = {**self.slots.buffers, **hidden, **on_device} | self._tables(tasks, shape)
        arguments = [on_device[name] for name in self._argument_names[shape.layout]]
        arguments += self._page_table if entry.takes_slabs else ()
        results = self.invoke_entry(shape.entry, arguments)
        named = entry.named_results(results, self._top_k)
        named |= {name: on_device[name] for name in SLOT_TABLES if name in on_device}
        return {name: self._device.download(buffer) for name, buffer in named.items()}

    def download_pages(self) -> list[Array]:
        """Return a copy of each slab [pages, elements]; meant for page tables of a few pages."""
        return [self._device.download(slab) for slab in self._page_table]

    def draw(
        self, launch: Launch, rows: Sequence[int], fields: Fields, edits: Sequence[RowEdits]
    ) -> list[int]:
        """Queue draws and wait for their tokens, which are not stored. Raises InvocationError."""
        launches: list[DrawLaunch] = []
        try:
            launches.extend(self.launch_draws(launch, rows, fields, edits, slots=()))
            return [token_id for each in launches for token_id in self.drawn(each)]
        except BaseException:
            for each in launches:
                self.abandon(each)
            raise

    def launch_draws(
        self,
        launch: Launch,
        rows: Sequence[int],
        fields: Fields,
        edits: Sequence[RowEdits] = (),
        *,
        slots: Sequence[int] | None = None,
    ) -> Iterator[DrawLaunch]:
        """Queue, one by one, entries that draw the tokens of `rows` of the last batch that was launched.

        With `edits`, one for each row, the rows are adjusted first; `slots` as for `padded_draws`, one for
        each row. Callers must check that `buckets` has `sample` entries, or `adjusted_sample`.
        """
        results, tasks = self.results_in_flight(launch), launch.batch.tasks
        layout = Layout.ADJUSTED_SAMPLE if edits else Layout.SAMPLE
        while rows:
            shape = self.buckets.row_shape(layout, len(rows))
            taken, rows = rows[: shape.rows], rows[shape.rows :]
            of_rows, edits = edits[: shape.rows], edits[shape.rows :]
            into, slots = slots and slots[: shape.rows], slots and slots[shape.rows :]
            arrays, given = self._draw_arguments.of(shape, tasks, taken, fields, of_rows, slots=into)
            is_recorded = launch.record is not None
            yield self.launch_draw(results, shape, arrays, taken, given, is_recorded=is_recorded)

    def launch_draw(
        self,
        results: Mapping[str, DeviceBuffer],
        shape: Shape,
        arrays: Mapping[str, Array],
        rows: Sequence[int],
        given: Mapping[str, DeviceBuffer] | None = None,
        *,
        is_recorded: bool = True,
    ) -> DrawLaunch:
        """Queue the sampling entry of `shape` on `arrays`, which draw from these rows of `results`.

        `given`: the same arguments on the device, if they are there.
        """
        recorder = self._recorder if is_recorded else None
        record = None if recorder is None else recorder.draw(shape.entry, arrays, len(rows))
        given = given or {name: self._upload(array) for name, array in arrays.items()}
        return DrawLaunch(rows, self._submit_rows(results, shape, given, record), record)

    def launch_logprobs(self, launch: Launch, slots: Mapping[int, int]) -> Iterator[LogprobsLaunch]:
        """Queue, one by one, entries that compute terms of rows of the last batch that was launched.

        `slots` maps each row to the slot that has its token. Callers must have queued the draws of these.
        """
        rows, results = list(slots), self.results_in_flight(launch)
        while rows:
            shape = self.buckets.row_shape(Layout.LOGPROBS, len(rows))
            taken, rows = rows[: shape.rows], rows[shape.rows :]
            arrays = padded_logprobs(shape.rows, {row: slots[row] for row in taken})
            yield self.launch_terms(results, shape, arrays, taken)

    def launch_terms(
        self,
        results: Mapping[str, DeviceBuffer],
        shape: Shape,
        arrays: Mapping[str, Array],
        rows: Sequence[int],
    ) -> LogprobsLaunch:
        """Queue the `logprobs` entry of `shape` on `arrays`, which names these rows of `results`."""
        record = None if self._recorder is None else self._recorder.logprobs(shape.entry, arrays, len(rows))
        given = self._logprob_arguments.on_device(arrays)
        return LogprobsLaunch(rows, self._submit_rows(results, shape, given, record), record)

    def _submit_rows(
        self,
        results: Mapping[str, DeviceBuffer],
        shape: Shape,
        given: Mapping[str, DeviceBuffer],
        record: Invocation | None,
    ) -> Pending:
        """Queue an entry that reads rows of `results`."""
        begin = self.clock()
        arguments = {**results, **given, **self.slots.buffers}
        names = self._argument_names[shape.layout]
        pending = self._submit(shape.entry, [arguments[name] for name in names], record)
        self.device_s += self.clock() - begin
        self._count(shape, [])
        return pending

    def _tables(self, tasks: Sequence[LlmTaskInput], shape: Shape) -> dict[str, DeviceBuffer]:
        """Return the tasks' block tables on the device, by argument name."""
        size = shape.rows, shape.blocks
        page_lists = [task.page_ids for task in tasks]
        if not self._has_window_table and self._slabs[0].pool == "whole":
            return {"seq_block_ids": self._block_tables.on_device(page_lists, *size)}
        window_lists = [task.window_page_ids or () for task in tasks]
        replaced = state_pages(tasks, self.stride)
        if not self._has_window_table:
            return {"seq_block_ids": self._block_tables.on_device(window_lists, *size, replaced)}
        return {
            "seq_block_ids": self._block_tables.on_device(page_lists, *size),
            "window_block_ids": self._window_tables.on_device(window_lists, *size, replaced),
        }

    def _count(self, shape: Shape, lengths: Sequence[int]) -> None:
        self._counts[shape.entry].add(lengths, shape.tokens)
        self._ran.add(shape.entry)

    def _upload(self, array: Array) -> DeviceBuffer:
        self.num_uploads += 1
        return self._device.upload(array)

    def clear_pages(self, page_ids: Collection[int], window_page_ids: Collection[int] = ()) -> None:
        """Zero pages that may hold NaN, and each slab's scratch page, which padding rows wrote."""
        record = None if self._recorder is None else self._recorder.clear(page_ids, window_page_ids)
        with self._completing(record):
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
        """Bytes of all tables, and of the results and workspace of entries that do not allocate these."""
        tables = [*self._page_table, *self.slots.buffers.values()]
        return sum(prod(table.shape) * table.dtype.itemsize for table in tables) + self._invoker.num_bytes

    def padding_arguments(self, shape: Shape) -> list[DeviceBuffer]:
        """Return arguments of `shape` that have only padding rows."""
        if shape.layout in ROW_LAYOUTS:
            types = self._entries[shape.entry].arguments or ()
            return [self._device.upload(np.zeros([size or 1 for size in t.shape], t.dtype)) for t in types]
        scratch = self._device.upload(np.zeros((shape.rows, shape.blocks), np.int64))
        return self._on_device(shape, (), dict.fromkeys(BLOCK_TABLES, scratch))

    def _on_device(
        self,
        shape: Shape,
        tasks: Sequence[LlmTaskInput],
        given: Mapping[str, DeviceBuffer] = MappingProxyType({}),
    ) -> list[DeviceBuffer]:
        """Return all arguments of the entry on the device; `given` has some of them by name."""
        tables = {} if BLOCK_TABLES[0] in given else self._tables(tasks, shape)
        on_device = {**tables, **given, **self.slots.buffers}
        names = self._argument_names[shape.layout]
        if any(name not in on_device for name in names):
            arrays = padded_arrays(shape, tasks) | self._hidden(shape, tasks)
            on_device |= {name: self._upload(arrays[name]) for name in names if name not in on_device}
        return [*(on_device[name] for name in names), *self._page_table]

    def _hidden(self, shape: Shape, tasks: Sequence[LlmTaskInput]) -> dict[str, Array]:
        """Return the rows of hidden states; none if the entry finds them itself, or the model has none."""
        has_rows = "hidden_from" in self._argument_names[shape.layout]
        return self.slots.hidden_rows(tasks, shape.rows) if has_rows else {}

    def invoke_entry(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Sequence[DeviceBuffer]:
        """Run an entry on these arguments and wait for it, without counting. Raises InvocationError."""
        return self._invoker.submit(entry, arguments).wait()

    def _fetch(self, batch: Batch, found: Mapping[str, DeviceBuffer]) -> BatchResult:
        """Copy values and indices to the host; logits stay on the device until a row's logits are needed."""
        download = self._device.download
        values, indices = (download(found[name]) if name in found else None for name in ("values", "indices"))
        fetch_logits = (lambda: download(found["logits"])) if "logits" in found else None
        return BatchResult(batch, values, indices, fetch_logits, found)

    def _named(self, shape: Shape, results: Sequence[DeviceBuffer]) -> dict[str, DeviceBuffer]:
        """Return the results of an entry by name."""
        entry = Entry.parse(shape.entry)
        assert entry is not None, "buckets have entries only"
        return entry.named_results(results, self._top_k)
