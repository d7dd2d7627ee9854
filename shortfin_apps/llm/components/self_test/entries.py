"""Runs each entry of a program on batches of test prompts, with as many rows as the entry takes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_result import BatchResult
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Shape, widest
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.sampling.logprobs import computed_terms
from shortfin_apps.llm.components.self_test.computed import (
    Computed,
    compare_row,
    drawn_as_seen,
    logprobs_as_seen,
    with_draw,
)
from shortfin_apps.llm.components.self_test.last_tokens import (
    adjusted_arguments,
    logprob_arguments,
    loop_arguments,
    packed_arguments,
    sample_arguments,
)
from shortfin_apps.llm.components.self_test.rows import Row, TestPages
from shortfin_apps.llm.contract.abi import (
    LOGPROB_RESULTS,
    MIN_BLOCKS,
    ROW_LAYOUTS,
    Entry,
    EntryFamily,
    Layout,
)
from shortfin_apps.llm.contract.self_test_file import (
    DECODE_STEPS,
    ExpectedLogits,
    SelfTestFile,
    TestLayout,
)

Array = npt.NDArray[Any]

# Prefills run first: other entries read the pages that prefills write.
_ORDER = (
    Layout.PREFILL,
    Layout.PACKED,
    Layout.DECODE,
    Layout.DRAFT,
    Layout.LOOP,
    *ROW_LAYOUTS,
)
# Rows of an `extend`: maximum number of decodes, and total rows if the entry takes any number of rows.
_PACKED_DECODES = 4
_DYNAMIC_ROWS = 6


class EntryRuns:
    """Runs a self-test's invocations, entry by entry, on pages of `cache`. Callers must `release` these."""

    def __init__(self, runner: BatchRunner, cache: KVCache, file: SelfTestFile) -> None:
        self._runner = runner
        self._cache = cache
        self._file = file
        self._layout = TestLayout(stride=file.stride, length=len(file.prompts[0].token_ids))
        self._pages = TestPages(runner, cache, file.prompts)
        self._has_prefixes = False
        shapes = runner.buckets.smallest_shapes()
        self.shapes = sorted(shapes, key=lambda each: (_ORDER.index(each.layout), each.rows, each.entry))
        self.rows: list[Row] = []  # of the last invocation

    def of(self, shape: Shape) -> Generator[list[Computed]]:
        """Run the entry of `shape`; yield the results of each invocation before the pages are released.

        Invocations that only prepare pages yield an empty list. If there are too few pages for one row, no
        results are yielded. Raises InvocationError.
        """
        runs = {
            Layout.PREFILL: self._prefill,
            Layout.PACKED: self._extend,
            Layout.DECODE: self._decode,
            Layout.DRAFT: self._draft,
            Layout.LOOP: self._loop,
            Layout.SAMPLE: self._sample,
            Layout.ADJUSTED_SAMPLE: self._adjusted_sample,
            Layout.LOGPROBS: self._logprobs,
        }
        self._runner.clear_suspects(self._cache)  # as an engine does before each invocation
        try:
            if shape.layout is not Layout.PREFILL and not self._has_prefixes:
                self._has_prefixes = self._fill_prefixes()
                yield []
            if shape.layout is Layout.PREFILL or self._has_prefixes:
                yield from runs[shape.layout](shape)
        finally:
            self._pages.release_rows()

    def release(self) -> None:
        self._has_prefixes = False
        self._pages.release()

    def _fill_prefixes(self) -> bool:
        """Compute the full pages that decoding rows start with; return False if there are too few pages."""
        base = max(self._layout.bases)
        if not base:
            return True
        if (rows := self._pages.prefix_rows(base)) is None:
            return False
        for row in rows:
            self._runner.run_as(*self._nearest_prefill(row.task(0, base)))
        return True

    def _nearest_prefill(self, task: LlmTaskInput) -> tuple[Shape, Batch]:
        batch = Batch(EntryFamily.PREFILL, (task,))
        return self._runner.buckets.nearest(batch), batch

    def _prefill(self, shape: Shape) -> Generator[list[Computed]]:
        """Prefill whole prompts in chunks; later chunks read the pages that earlier chunks have written.

        Chunks have the entry's static length. If the length is dynamic, there are two: one page, and the
        rest.
        """
        self.rows = self._pages.prefilling(shape.rows)
        entry = Entry.parse(shape.entry)
        static = None if entry is None else entry.length
        total = self._layout.length
        ends = range(static, total, static) if static else (min(self._layout.stride, total),)
        start = 0
        for stop in (*ends, total):
            if self.rows and stop > start:
                tasks = [row.task(start, stop) for row in self.rows]
                yield self._run(self._chunk_shape(shape, start, stop, static), EntryFamily.PREFILL, tasks)
            start = stop

    def _chunk_shape(self, shape: Shape, start: int, stop: int, static: int | None) -> Shape:
        stride = self._layout.stride
        length = static or -(-(stop - start) // stride) * stride
        blocks = max(MIN_BLOCKS, start // stride + length // stride)
        return Shape(shape.entry, shape.layout, shape.rows, shape.rows * length, blocks)

    def _decode(self, shape: Shape) -> Generator[list[Computed]]:
        self.rows = self._pages.decoding(shape.rows, self._layout.bases)
        for step in range(DECODE_STEPS):
            tasks = [row.task(row.start + step, row.start + step + 1) for row in self.rows]
            if tasks:
                wide = Shape(shape.entry, shape.layout, shape.rows, shape.tokens, widest(tasks))
                yield self._run(wide, EntryFamily.DECODE, tasks)

    def _draft(self, shape: Shape) -> Generator[list[Computed]]:
        """Run the draft layer after prefixes, without the hidden states of their last tokens."""
        self.rows = self._pages.decoding(shape.rows, self._layout.bases)
        tasks = [row.decode for row in self.rows]
        if tasks:
            wide = Shape(shape.entry, shape.layout, shape.rows, shape.tokens, widest(tasks))
            result = self._runner.run_as(wide, Batch(EntryFamily.DRAFT, tuple(tasks)))
            found = [
                self._compared(shape.entry, index, self._file.prompts[row.prompt].draft_at(row.start), result)
                for index, row in enumerate(self.rows)
            ]
            yield [replace(each, is_draft=True) for each in found if each is not None]

    def _extend(self, shape: Shape) -> Generator[list[Computed]]:
        """Run decodes and whole prompts in one invocation, as many as the entry takes.

        If the entry takes followers, the first decode has one.
        """
        entry = Entry.parse(shape.entry)
        length = None if entry is None else entry.length
        prompt_length = self._layout.length
        most_rows = self._runner.buckets.most_rows(shape.entry) or _DYNAMIC_ROWS
        num_decodes = max(1, min(most_rows - 1, _PACKED_DECODES, length or most_rows))
        decodes = self._pages.decoding(num_decodes, self._layout.bases)
        tasks = [row.decode for row in decodes]
        followers = self._followers_of(decodes[:1], min(most_rows, length or most_rows) - len(decodes))
        if followers:
            tasks[1:1] = followers
            # Without sums, because the followers write to the same page.
            decodes[:1] = [replace(decodes[0], summed=None)] * (1 + len(followers))
        room = most_rows - len(decodes)
        if length is not None:
            room = min(room, (length - len(decodes)) // prompt_length)
        prefills = self._pages.prefilling(room)
        self.rows = [*decodes, *prefills]
        if not self.rows:
            return
        tasks += [row.task(0, prompt_length) for row in prefills]
        total = sum(len(task.token_ids) for task in tasks)
        packed = Shape(shape.entry, shape.layout, len(tasks), length or total, widest(tasks))
        arrays = packed_arguments(tasks, packed.tokens, len(followers))
        found = self._runner.invoke(packed, tasks, arrays)
        yield self._of_rows(shape.entry, tasks, found)

    def _followers_of(self, decodes: Sequence[Row], room: int) -> list[LlmTaskInput]:
        """Return the tasks of the tokens after the first decode's; none if the program takes none."""
        if not (decodes and self._runner.buckets.takes_followers):
            return []
        followers, [first] = [], decodes
        pages = self._pages.decoding(min(DECODE_STEPS - 1, max(0, room)), (0,))  # of their states
        for step, row in enumerate(pages, 1):
            followers.append(task := first.task(first.start + step, first.start + step + 1))
            assert row.lease.window_page_ids is not None, "the model has states"
            task.state_page_id = row.lease.window_page_ids[0]
        return followers

    def _loop(self, shape: Shape) -> Generator[list[Computed]]:
        self.rows = self._pages.decoding(shape.rows, self._layout.bases)
        tasks = [row.decode for row in self.rows]
        if not tasks:
            return
        wide = Shape(shape.entry, shape.layout, shape.rows, shape.tokens, widest(tasks))
        table, arrays = loop_arguments(tasks, shape.rows)
        found = self._runner.invoke(wide, tasks, arrays)
        token_ids = found["token_ids"][: len(tasks)]
        problem = table.problem(found["last_tokens"], token_ids)
        yield [
            with_draw(row, found["logits"][row.row, 0], int(token_ids[row.row]), problem)
            for row in self._of_rows(shape.entry, tasks, found)
        ]

    def _sample(self, shape: Shape) -> Generator[list[Computed]]:
        """Draw tokens from the rows of a decode; the decode's rows repeat until the entry's rows are full."""
        if (result := self._decoded(shape.rows)) is None:
            return
        yield []
        sources = self._sources(shape.rows)
        table, arrays = sample_arguments([self.rows[source].decode for source in sources], sources)
        found = self._runner.invoke(shape, (), arrays, result.on_device)
        problem = table.problem(found["last_tokens"], found["token_ids"])
        yield self._drawn_as_seen(shape, result, sources, found["token_ids"], problem)

    def _adjusted_sample(self, shape: Shape) -> Generator[list[Computed]]:
        """Draw tokens like `_sample`, and count the tokens of some rows."""
        if (result := self._decoded(shape.rows)) is None:
            return
        yield []
        sources, left = self._sources(shape.rows), result.on_device
        tasks = [self.rows[source].decode for source in sources]
        table, arrays = adjusted_arguments(tasks, sources, left["logits"].shape[-1])
        found = self._runner.invoke(shape, (), arrays, left)
        drawn = found["token_ids"][: len(table.token_ids)]
        problem = table.problem(found["last_tokens"], drawn) or table.counts_problem(found["counts"], drawn)
        yield self._drawn_as_seen(shape, result, sources, found["token_ids"], problem)

    def _drawn_as_seen(
        self, shape: Shape, result: BatchResult, sources: Sequence[int], token_ids: Array, problem: str | None
    ) -> list[Computed]:
        """Return the results of draws from the rows `sources` of `result`."""
        computed = []
        for index, (source, token_id) in enumerate(zip(sources, token_ids.tolist(), strict=True)):
            row, logits = self.rows[source], _logits_of(result, source)
            seen = drawn_as_seen(shape.entry, index, row.prompt, row.start, logits, token_id)
            computed.append(replace(seen, problem=seen.problem or problem))
        return computed

    def _logprobs(self, shape: Shape) -> Generator[list[Computed]]:
        """Compute terms of the rows of a decode, in turn with a likely token and with any other."""
        if (result := self._decoded(shape.rows)) is None:
            return
        yield []
        sources = self._sources(shape.rows)
        of_rows = [_logits_of(result, source) for source in sources]
        tokens = [
            int(logits.argmax()) if index % 2 else 7 * index % len(logits)
            for index, logits in enumerate(of_rows)
        ]
        table, arrays = logprob_arguments(tokens, sources)
        found = self._runner.invoke(shape, (), arrays, result.on_device)
        problem = table.problem(found["last_tokens"], np.array(tokens))
        computed = []
        for index, terms in enumerate(computed_terms(*(found[name] for name in LOGPROB_RESULTS))):
            row, of_row = self.rows[sources[index]], (of_rows[index], tokens[index], terms)
            seen = logprobs_as_seen(shape.entry, index, row.prompt, row.start, *of_row)
            computed.append(replace(seen, problem=seen.problem or problem))
        yield computed

    def _decoded(self, num_rows: int) -> BatchResult | None:
        """Run a decode of about `num_rows` rows for entries that read its rows; None without pages."""
        decode = self._runner.buckets.decode_of(num_rows)
        self.rows = self._pages.decoding(decode.rows, self._layout.bases)
        if not self.rows:
            return None
        batch = Batch(EntryFamily.DECODE, tuple(row.decode for row in self.rows))
        return self._runner.run_as(self._runner.buckets.nearest(batch), batch)

    def _sources(self, num_rows: int) -> list[int]:
        """Return `num_rows` indices of the decode's rows, which repeat."""
        return [index % len(self.rows) for index in range(num_rows)]

    def _of_rows(
        self, entry: str, tasks: Sequence[LlmTaskInput], found: Mapping[str, Array]
    ) -> list[Computed]:
        """Compare the rows of results on the host; rows without an expected result are left out."""
        compared = []
        for index, task in enumerate(tasks):
            prompt = self.rows[index].prompt
            if (expected := self._file.prompts[prompt].at(task.seq_len - 1)) is not None:
                row = (found[name][index, 0] for name in ("logits", "values", "indices"))
                compared.append(compare_row(entry, index, prompt, expected, self._file, *row))
        return compared

    def _run(self, shape: Shape, family: EntryFamily, tasks: Sequence[LlmTaskInput]) -> list[Computed]:
        result = self._runner.run_as(shape, Batch(family, tuple(tasks)))
        return [
            computed
            for index, task in enumerate(tasks)
            if (computed := self._compared(shape.entry, index, self._expected(index, task), result))
            is not None
        ]

    def _expected(self, index: int, task: LlmTaskInput) -> ExpectedLogits | None:
        return self._file.prompts[self.rows[index].prompt].at(task.seq_len - 1)

    def _compared(
        self, entry: str, index: int, expected: ExpectedLogits | None, result: BatchResult
    ) -> Computed | None:
        """Compare row `index`; None if the file has no logits to compare it with."""
        if expected is None:
            return None
        prompt = self.rows[index].prompt
        row = result.row(index, with_logits=True)
        assert row.logits is not None, "asked for"
        return compare_row(entry, index, prompt, expected, self._file, row.logits, row.values, row.token_ids)


def _logits_of(result: BatchResult, row: int) -> Array:
    logits = result.row(row, with_logits=True).logits
    assert logits is not None, "asked for"
    return logits
