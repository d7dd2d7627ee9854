"""From a batch to device arguments and back.

Entries are upstream's (`module_abi_version` 1):

    prefill_bsN(tokens[N,S], [start_positions[N],] seq_lens[N], seq_block_ids[N,B], cache...)
    decode_bsN(tokens[N,1], seq_lens[N], start_positions[N], seq_block_ids[N,B], cache...)

all i64, with one cache slab per pipeline stage; `prefill_bsN_sS` is the same for one S. Results are
logits `[N, 1 or S, V]`, or values and indices `[N, 1 or S, K]`, or those and then logits.
A padding row has tokens 0, start 0, seq_len 1 and the scratch page, so it disturbs nobody.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput, Phase
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, EntrySignature, Program
from shortfin_apps.llm.components.sampling import Candidates
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

Array = npt.NDArray[Any]
# Upstream's exporter states 2 as the least block-table width its VMFBs were compiled for.
MIN_BLOCKS = 2
_ENTRY = re.compile(r"(prefill|decode)_bs(\d+)(?:_s(\d+))?")


@dataclass(frozen=True, slots=True)
class Shape:
    """One invocation's compiled shape: `rows` N, `length` S tokens a row, `blocks` B."""

    entry: str
    rows: int
    length: int
    blocks: int


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

    def row(self, index: int, with_logits: bool) -> Candidates:
        """Row `index`'s candidates; `with_logits` adds its `[V]` logits where the entry returns any."""
        logits = self._row_of(self._all_logits(), index) if with_logits else None
        if self._values is None or self._indices is None:
            return Candidates(np.empty(0), np.empty(0, np.int64), logits)
        return Candidates(self._row_of(self._values, index), self._row_of(self._indices, index), logits)

    def _all_logits(self) -> Array:
        assert self._fetch_logits is not None, "asked for logits of an entry that returns none"
        if self._logits is None:
            self._logits = self._fetch_logits().astype(np.float32, copy=False)
        return self._logits

    def _row_of(self, array: Array, index: int) -> Array:
        last = 0 if array.shape[1] == 1 else len(self._tasks[index].input_tokens) - 1
        row: Array = array[index, last]
        return row


class _BlockTable:
    """A decode batch's block table on the device, kept while no member changes or gets a page."""

    def __init__(self, shape: Shape, tasks: Sequence[LlmTaskInput], device: Device) -> None:
        self.shape = shape
        self._page_lists = [(task.page_ids, len(task.page_ids)) for task in tasks]
        self.buffer = device.upload(_block_ids(shape, tasks))

    def fits(self, tasks: Sequence[LlmTaskInput]) -> bool:
        return len(tasks) == len(self._page_lists) and all(
            task.page_ids is pages and len(pages) == length
            for task, (pages, length) in zip(tasks, self._page_lists, strict=True)
        )


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
        self._buckets = Buckets(program.entries, config.stride)
        self._block_table: _BlockTable | None = None
        self.num_plans = 0
        self.padded_tokens = 0
        self.invocations: Counter[str] = Counter()
        self.device_s = 0.0

    @property
    def num_candidates(self) -> int:
        """K of the entries' top-k; 0 when they return logits only."""
        return self._config.top_k or 0

    @property
    def returns_logits(self) -> bool:
        signature = self._program.entries[self._buckets.any_decode()]
        if self._config.top_k is None:
            return True
        return signature.results is not None and len(signature.results) > 2

    def run(self, batch: Batch) -> BatchResult:
        """Invokes the nearest entry and waits for it. Raises InvocationError."""
        arguments = self._decode(batch) if batch.phase is Phase.DECODE else self._prefill(batch)
        shape, buffers = arguments
        begin = self._clock()
        results = self._program.submit(shape.entry, [*buffers, *self._page_table]).wait()
        result = self._result(batch, results)
        self.device_s += self._clock() - begin
        self._count(shape, batch)
        return result

    def warm_up(self) -> None:
        """Runs every entry once on padding rows alone, so that no request pays for first touches."""
        for shape in self._buckets.shapes():
            arguments = self._arguments(Phase.DECODE if shape.length == 1 else Phase.PREFILL, shape, ())
            self._program.submit(shape.entry, [*arguments, *self._page_table]).wait()

    def _decode(self, batch: Batch) -> tuple[Shape, list[DeviceBuffer]]:
        table = self._block_table
        if table is None or not table.fits(batch.tasks):
            table = _BlockTable(self._buckets.decode(batch.tasks), batch.tasks, self._device)
            self._block_table = table
            self.num_plans += 1
        return table.shape, self._arguments(Phase.DECODE, table.shape, batch.tasks, table.buffer)

    def _prefill(self, batch: Batch) -> tuple[Shape, list[DeviceBuffer]]:
        shape = self._buckets.prefill(batch.tasks, has_position=self._config.has_prefill_position)
        self.num_plans += 1
        return shape, self._arguments(Phase.PREFILL, shape, batch.tasks)

    def _arguments(
        self,
        phase: Phase,
        shape: Shape,
        tasks: Sequence[LlmTaskInput],
        block_ids: DeviceBuffer | None = None,
    ) -> list[DeviceBuffer]:
        upload = self._device.upload
        tokens = np.zeros((shape.rows, shape.length), np.int64)
        starts = np.zeros(shape.rows, np.int64)
        seq_lens = np.ones(shape.rows, np.int64)
        for row, task in enumerate(tasks):
            tokens[row, : len(task.input_tokens)] = task.input_tokens
            starts[row] = task.start_position
            seq_lens[row] = task.seq_len
        if block_ids is None:
            block_ids = upload(_block_ids(shape, tasks))
        if phase is Phase.DECODE:
            return [upload(tokens), upload(seq_lens), upload(starts), block_ids]
        if self._config.has_prefill_position:
            return [upload(tokens), upload(starts), upload(seq_lens), block_ids]
        return [upload(tokens), upload(seq_lens), block_ids]

    def _result(self, batch: Batch, results: Sequence[DeviceBuffer]) -> BatchResult:
        download = self._device.download
        if self._config.top_k is None:
            return BatchResult(batch, None, None, lambda: download(results[0]))
        fetch = (lambda: download(results[2])) if len(results) > 2 else None
        return BatchResult(batch, download(results[0]), download(results[1]), fetch)

    def _count(self, shape: Shape, batch: Batch) -> None:
        self.invocations[shape.entry] += 1
        self.padded_tokens += shape.rows * shape.length - sum(len(t.input_tokens) for t in batch.tasks)


class Buckets:
    """The compiled shapes a VMFB offers, and the nearest one for a batch."""

    def __init__(self, entries: Mapping[str, EntrySignature], stride: int) -> None:
        self._stride = stride
        self._decode: dict[int, str] = {}
        self._prefill: dict[int, str] = {}  # any S
        self._static_prefill: dict[tuple[int, int], str] = {}
        for name in entries:
            if match := _ENTRY.fullmatch(name):
                kind, rows, length = match[1], int(match[2]), match[3]
                if kind == "decode":
                    self._decode[rows] = name
                elif length is None:
                    self._prefill[rows] = name
                else:
                    self._static_prefill[rows, int(length)] = name
        if not self._decode or not (self._prefill or self._static_prefill):
            raise ArtifactError("the VMFB has no prefill_bsN or no decode_bsN entry; rebuild it")

    def any_decode(self) -> str:
        return self._decode[min(self._decode)]

    def shapes(self) -> list[Shape]:
        """The least shape of every entry."""
        decodes = [Shape(name, rows, 1, MIN_BLOCKS) for rows, name in self._decode.items()]
        least = MIN_BLOCKS * self._stride
        dynamic = [Shape(name, rows, least, MIN_BLOCKS) for rows, name in self._prefill.items()]
        static = [
            Shape(name, rows, length, max(MIN_BLOCKS, length // self._stride))
            for (rows, length), name in self._static_prefill.items()
        ]
        return decodes + dynamic + static

    def decode(self, tasks: Sequence[LlmTaskInput]) -> Shape:
        rows = min(n for n in self._decode if n >= len(tasks))
        blocks = max(MIN_BLOCKS, *(len(task.page_ids) for task in tasks))
        return Shape(self._decode[rows], rows, 1, blocks)

    def prefill(self, tasks: Sequence[LlmTaskInput], *, has_position: bool) -> Shape:
        """B covers the pages before the latest start and those of S, whatever each row owns."""
        longest = max(-(-len(task.input_tokens) // self._stride) for task in tasks)
        if not has_position:
            longest = max(longest, MIN_BLOCKS)  # S and B are one symbol there
        entry, rows, length = self._prefill_entry(len(tasks), longest * self._stride)
        first = max(task.start_position for task in tasks) // self._stride
        return Shape(entry, rows, length, max(MIN_BLOCKS, first + length // self._stride))

    def _prefill_entry(self, num_rows: int, length: int) -> tuple[str, int, int]:
        rows = min(n for n in self._prefill_rows() if n >= num_rows)
        exact = self._static_prefill.get((rows, length))
        if exact is not None:
            return exact, rows, length
        if rows in self._prefill:
            return self._prefill[rows], rows, length
        nearest = min(s for n, s in self._static_prefill if n == rows and s >= length)
        return self._static_prefill[rows, nearest], rows, nearest

    def _prefill_rows(self) -> set[int]:
        return self._prefill.keys() | {rows for rows, _ in self._static_prefill}


def _block_ids(shape: Shape, tasks: Sequence[LlmTaskInput]) -> Array:
    """`[N, B]`; what a row does not own is the scratch page."""
    block_ids = np.zeros((shape.rows, shape.blocks), np.int64)
    for row, task in enumerate(tasks):
        pages = task.page_ids[: shape.blocks]
        block_ids[row, : len(pages)] = pages
    return block_ids
