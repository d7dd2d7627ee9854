"""Runs a dump's invocations again with their recorded arguments and compares the results.

Pages that the server wrote before the first record are recomputed when a request first reads them: the
request's tokens before its task are prefilled into these pages. Window pages and states cannot be recomputed,
as the server has freed earlier pages that they depend on. Requests that read them are run, but their results
are not compared.

If a page that the replay wrote has other tokens than its reader expects, the page is left unchanged, as it
was on the server, and reported in `findings`.

The server queues invocations of tokens that only the device knows yet. The replay takes each of them from the
request's later tokens, or else from its own draws, and keeps no tables by slot: edits get the counts that the
server's table had. A token that neither has is replaced by token 0, and its request is not compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.recorder.dump_file import Dump, DumpError
from shortfin_apps.llm.components.recorder.records import (
    Clear,
    Draw,
    Invocation,
    Logprobs,
    Run,
    Step,
    Task,
    Turn,
)
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily, Layout
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import DeviceLostError
from shortfin_apps.llm.tools.dump_replay.state import (
    UNKNOWN_TOKEN,
    Held,
    KnownPages,
    ReplayedRequests,
    Values,
    check_tokens,
    draw_arguments,
    is_unknown,
    lacks_counts,
    logprob_arguments,
    with_counts,
    without_slots,
)

_Replayed = Run | Step | Draw | Logprobs | Clear


class Verdict(Enum):
    """The result of comparing a record with its replay."""

    SAME = "same"
    DIFFERS = "differs"
    FAILED = "failed"  # only in the replay
    REPRODUCED = "reproduced"  # failed in the replay as on the server
    NOT_REPRODUCED = "not reproduced"  # failed only on the server
    UNFINISHED = "unfinished"  # still running when the dump was written, but ended in the replay
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one record. `request_id` and `position` are of the first token row that differs."""

    record: Invocation
    verdict: Verdict
    detail: str = ""
    request_id: str | None = None
    position: int | None = None


class Replay:
    """Replays one dump. Callers must give a runner with as many pages as the server's, all unused.

    `is_same_program` is False for a program other than the server's. Rows of logits are then compared by
    their best candidate instead of their checksum, which changes with rounding. Raises DumpError for a dump
    that contradicts itself or the model.
    """

    def __init__(
        self,
        dump: Dump,
        runner: BatchRunner,
        config: ModelConfig,
        *,
        vocab_size: int | None = None,
        is_same_program: bool = True,
    ) -> None:
        self._recording = dump.recording
        self._runner = runner
        self._config = config
        self._vocab_size = vocab_size
        self._is_same_program = is_same_program
        self._requests = ReplayedRequests(dump.recording.requests)
        self._loops = {loop.number: loop for loop in dump.recording.loops}
        self._pages = KnownPages(config.stride)
        has_state = "state" in config.pools
        self._window_pages = KnownPages(config.stride, is_exact=has_state)
        self._inexact: set[int] = set()  # requests with pages or tokens that cannot be recomputed
        self._given_up: set[tuple[int, int]] = set()  # requests and positions of drafts in the last batch
        self._drawn: dict[int, dict[int, int]] = {}  # the token IDs that each request drew, by position
        self._last: tuple[Launch, Sequence[Task]] | None = None  # the batch that draws take rows of
        self._is_lost = False
        self.prefilled_tokens = 0  # tokens computed to restore pages from before the first record
        self.findings: list[str] = []  # each describes a page with other tokens than its reader expects

    def run(self, first: int = 0, last: int | None = None) -> Iterator[Outcome]:
        """Yield the outcomes of records `first` to `last`. Earlier records run too, as they write pages."""
        for record in self._recording.records:
            if isinstance(record, Turn) or (last is not None and record.number > last):
                continue
            outcome = self._outcome(record)
            if record.number >= first:
                yield outcome
            if self._is_lost:
                return

    def _outcome(self, record: _Replayed) -> Outcome:
        self._requests.change(record.pages)
        try:
            match record:
                case Run():
                    return self._run(record)
                case Step():
                    return self._step(record)
                case Draw():
                    return self._draw(record)
                case Logprobs():
                    return self._logprobs(record)
                case Clear():
                    return self._clear(record)
        except DumpError:
            raise
        except Exception as error:  # the runtimes have no common exception
            return self._failed(record, error)

    def _failed(self, record: Invocation, error: Exception) -> Outcome:
        self._is_lost = isinstance(error, DeviceLostError)
        self._runner.forget_state()
        verdict = Verdict.FAILED if record.error is None else Verdict.REPRODUCED
        return Outcome(record=record, verdict=verdict, detail=f"{type(error).__name__}: {error}")

    def _run(self, record: Run) -> Outcome:
        self._last = None
        tasks = self._prepared(record.tasks)
        try:
            batch = self._batch(EntryFamily(record.family), tasks)
        except ValueError:
            raise DumpError(f"record {record.number} is of an unknown family of entries") from None
        fields = _no_fields if self._is_for_draws(record, batch) else None
        launch = self._runner.launch(batch, fields)
        result = self._runner.result(launch)
        self._last = launch, tasks
        self._wrote(tasks)
        mine = Run(number=0, began_s=0.0, entry="", family="", blocks=0, tasks=())
        if (candidates := result.note(mine)) is not None:
            candidates.note(mine)
        if record.logits:
            result.row(0, with_logits=True)
        if self._is_same_program:
            pairs = [(record.checksums, mine.checksums), (record.logits, mine.logits)]
        else:
            pairs = [(record.best, mine.best)]
        return self._compared(record, tasks, pairs)

    def _step(self, record: Step) -> Outcome:
        self._last = None
        loop = self._loops[record.loop]
        tasks = self._prepared([_task_of_step(first, record.index) for first in loop.tasks])
        batch = self._batch(EntryFamily.DECODE, tasks)
        fields = {
            id(task.request): array("q", of_task)
            for task, of_task in zip(batch.tasks, loop.sampling, strict=False)
        }
        self._shape(record, batch, draws=True)
        launch = self._runner.launch(batch, lambda request: fields[id(request)])
        token_ids = self._runner.wait(launch)
        assert token_ids is not None, "a decode loop draws"
        self._last = launch, tasks
        self._wrote(tasks)
        self._drew(tasks, record.token_ids or token_ids)
        return self._compared(record, tasks, [(record.token_ids, token_ids)])

    def _draw(self, record: Draw) -> Outcome:
        if self._last is None:
            return _without_batch(record)
        launch, of_rows = self._last
        results = self._runner.results_in_flight(launch)
        arrays = draw_arguments(record, results)
        layout = Layout.ADJUSTED_SAMPLE if "edits" in arrays else Layout.SAMPLE
        shape = self._row_shape(record, layout, arrays)
        rows, tasks = _rows_of(record, record.num_draws, arrays, of_rows)
        vocab_size = results["logits"].shape[-1]
        for row, task in enumerate(tasks):
            if lacks_counts(arrays, row) and (seen := self._seen(task)) is not None:
                arrays = with_counts(arrays, row, seen, vocab_size)
        arrays = without_slots(arrays)
        token_ids = self._runner.drawn(self._runner.launch_draw(results, shape, arrays, rows))
        self._drew(tasks, record.token_ids or token_ids)
        return self._compared(record, tasks, [(record.token_ids, token_ids)])

    def _logprobs(self, record: Logprobs) -> Outcome:
        """Compare the masses of rows; another program's differ by rounding, and are not compared."""
        if self._last is None:
            return _without_batch(record)
        launch, of_rows = self._last
        results = self._runner.results_in_flight(launch)
        arrays = logprob_arguments(record, results)
        shape = self._row_shape(record, Layout.LOGPROBS, arrays)
        rows, tasks = _rows_of(record, record.num_rows, arrays, of_rows)
        mine = Logprobs(number=0, began_s=0.0, entry="", arguments={}, num_rows=0)
        launched = self._runner.launch_terms(results, shape, arrays, rows)
        self._runner.terms(replace(launched, record=mine))
        pairs = [(record.masses, mine.masses)] if self._is_same_program else []
        return self._compared(record, tasks, pairs)

    def _row_shape(self, record: Draw | Logprobs, layout: Layout, arrays: Mapping[str, Values]) -> Shape:
        """Return the shape of the entry that reads as many existing rows as the recorded one."""
        num_rows = len(arrays["row_indices"])
        for shape in self._runner.buckets.smallest_shapes():
            if (shape.layout, shape.rows) == (layout, num_rows):
                return shape
        raise DumpError(f"the program has no entry {record.entry}")

    def _drew(self, tasks: Sequence[Task], token_ids: Sequence[int]) -> None:
        """Remember the token that was drawn after each task."""
        for task, token_id in zip(tasks, token_ids, strict=False):
            self._drawn.setdefault(task.request, {})[task.start + len(task.token_ids)] = token_id

    def _seen(self, task: Task) -> list[int] | None:
        """Return the request's tokens up to the task's; None, and no comparison, if one is not known."""
        known, drawn = self._requests[task.request].token_ids, self._drawn.get(task.request, {})
        missing = [drawn.get(position, UNKNOWN_TOKEN) for position in range(len(known), task.start)]
        if any(token_id < 0 for token_id in missing):
            self._inexact.add(task.request)
            return None
        return [*known[: task.start], *missing, *task.token_ids]

    def _clear(self, record: Clear) -> Outcome:
        self._runner.clear_pages(record.page_ids, record.window_page_ids)
        self._pages.forget(record.page_ids)
        self._window_pages.forget(record.window_page_ids)
        return self._compared(record, (), [])

    def _is_for_draws(self, record: Run, batch: Batch) -> bool:
        """Return whether the batch ran on the shape that `Buckets.nearest` chooses with `draws`."""
        for draws in (False, True):
            shape = self._shape(record, batch, draws=draws)
            if not self._is_same_program or (shape.entry, shape.blocks) == (record.entry, record.blocks):
                return draws
        raise DumpError(
            f"record {record.number} ran {record.entry} with {record.blocks} blocks, and its batch takes "
            f"{shape.entry} with {shape.blocks}: the dump is not of this program"
        )

    def _shape(self, record: Run | Step, batch: Batch, *, draws: bool) -> Shape:
        try:
            return self._runner.buckets.nearest(batch, draws=draws)
        except (AssertionError, ValueError):
            raise DumpError(f"the program has no entry that takes the batch of {record.entry}") from None

    def _compared(
        self,
        record: _Replayed,
        tasks: Sequence[Task],
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> Outcome:
        """Compare recorded and replayed results: each of `pairs` has both, with one value per token row."""
        if record.error is not None:
            return Outcome(record=record, verdict=Verdict.NOT_REPRODUCED)
        if record.ended_s is None:
            return Outcome(record=record, verdict=Verdict.UNFINISHED)
        num_compared = num_skipped = 0
        for recorded, found in pairs:
            if recorded and len(recorded) != len(found):
                return Outcome(record=record, verdict=Verdict.DIFFERS, detail="it has other results")
            for row, (there, here) in enumerate(zip(recorded, found, strict=False)):
                task = tasks[row] if row < len(tasks) else None
                if task is not None and (task.request, task.start) in self._given_up:
                    continue
                if task is not None and task.request in self._inexact:
                    num_skipped += 1
                    continue
                num_compared += 1
                if there != here:
                    return self._differing(record, task, there, here)
        verdict = Verdict.NOT_COMPARED if num_skipped and not num_compared else Verdict.SAME
        return Outcome(record=record, verdict=verdict)

    def _differing(self, record: _Replayed, task: Task | None, there: int, here: int) -> Outcome:
        is_token = not isinstance(record, Run | Logprobs) or not self._is_same_program
        detail = f"token {there} there, {here} here" if is_token else "other candidates or logits"
        if task is None:
            return Outcome(record=record, verdict=Verdict.DIFFERS, detail=detail)
        return Outcome(
            record=record,
            verdict=Verdict.DIFFERS,
            detail=detail,
            request_id=self._requests[task.request].request_id,
            position=task.start + len(task.token_ids) - 1,
        )

    def _batch(self, family: EntryFamily, tasks: Sequence[Task]) -> Batch:
        return Batch(family, tuple(self._input(task) for task in tasks))

    def _prepared(self, tasks: Sequence[Task]) -> list[Task]:
        """Restore the pages that the tasks read, and return the tasks with known tokens.

        A token that the host did not know, after another one of its request, was drafted and then given up.
        The device used what its table had in that place. The row had no effect, and is not compared.
        """
        prepared: list[Task] = []
        self._given_up.clear()
        for task in tasks:
            self._check(task)
            if is_unknown(task) and prepared and prepared[-1].request == task.request:
                self._given_up.add((task.request, task.start))
                task = Task(task.request, task.start, (0,), task.state_page)
            if task.request in self._requests.unchecked:
                self._requests.unchecked.discard(task.request)
                self._inexact.discard(task.request)
                self._fill_pages(task)
            prepared.append(self._known(task))
            check_tokens(prepared[-1], self._vocab_size)
        return prepared

    def _known(self, task: Task) -> Task:
        """Replace a token that the server's host did not know when it queued the task."""
        if not is_unknown(task):
            return task
        known = self._requests[task.request].token_ids
        token_id = self._drawn.get(task.request, {}).get(task.start, UNKNOWN_TOKEN)
        if task.start < len(known):
            token_id = known[task.start]
        elif token_id < 0:
            self._inexact.add(task.request)
            token_id = 0
        return Task(task.request, task.start, (token_id,))

    def _check(self, task: Task) -> None:
        request, stride = self._requests[task.request], self._config.stride
        end = task.start + len(task.token_ids)
        if end > min(request.num_pages * stride, self._config.max_seq_len):
            raise DumpError(f"request {task.request} has no page for position {end - 1}")
        if len(task.token_ids) > 1 and task.start % stride:
            raise DumpError(f"request {task.request} has a chunk that begins within a page")

    def _input(self, task: Task) -> LlmTaskInput:
        request = self._requests[task.request]
        end = task.start + len(task.token_ids)
        tables = request.page_ids, request.window_page_ids
        token_ids = list(task.token_ids)
        return LlmTaskInput(request, token_ids, task.start, end, *tables, state_page_id=task.state_page)

    def _fill_pages(self, task: Task) -> None:
        """Recompute the pages that the task reads and that were written before the first record.

        If that is impossible (windows, states, unknown tokens), exclude the request from comparison.
        """
        if is_unknown(task) and task.start > len(self._requests[task.request].token_ids):
            self._inexact.add(task.request)
            return
        before = self._requests.tokens(task.request, task.start)
        window = self._config.window_tokens
        request, stride = self._requests[task.request], self._config.stride
        held: list[tuple[int, Held]] = []
        if window is None or self._config.has_window_table:
            held += self._pages.held(request.page_ids, before, 0)
        if window is not None:
            first = max(0, task.start - window + 1) // stride
            held += self._window_pages.held(request.window_page_ids or (), before, first)
        if others := [block for block, what in held if what is Held.OTHER]:
            self.findings.append(
                f"request {request.request_id} reads block {others[0]} of its table, "
                "whose page holds other tokens"
            )
        unknown = [block for block, what in held if what is Held.UNKNOWN]
        if unknown and window is None:
            self._compute(task, before, unknown)
        elif unknown:
            self._inexact.add(task.request)

    def _compute(self, task: Task, before: Sequence[int], blocks: Sequence[int]) -> None:
        """Prefill the tokens of these blocks of the request; `before`: all its tokens before the task."""
        stride = self._config.stride
        if not self._config.has_prefill_position:
            self._prefill(task, before, 0, len(before))
            return
        most_blocks = max(1, _chunk_tokens(self._runner) // stride)
        while blocks:
            run = [block for index, block in enumerate(blocks[:most_blocks]) if block == blocks[0] + index]
            self._prefill(task, before, run[0] * stride, min(len(before), (run[-1] + 1) * stride))
            blocks = blocks[len(run) :]

    def _prefill(self, task: Task, before: Sequence[int], start: int, end: int) -> None:
        chunk = Task(task.request, start, tuple(before[start:end]))
        self._check(chunk)
        check_tokens(chunk, self._vocab_size)
        self._runner.run(Batch(EntryFamily.PREFILL, (self._input(chunk),)))
        self._pages.wrote(self._requests[task.request].page_ids, before[:end], start, is_known=True)
        self.prefilled_tokens += end - start

    def _wrote(self, tasks: Sequence[Task]) -> None:
        """Record which tokens the tasks wrote to pages. Tasks of one request must follow each other."""
        tokens: dict[int, list[int]] = {}
        for task in tasks:
            number, request = task.request, self._requests[task.request]
            if number not in tokens:
                tokens[number] = self._requests.tokens(number, min(task.start, len(request.token_ids)))
                tokens[number] += [UNKNOWN_TOKEN] * (task.start - len(tokens[number]))
            tokens[number][task.start :] = task.token_ids
            is_known = number not in self._inexact
            self._pages.wrote(request.page_ids, tokens[number], task.start, is_known=is_known)
            if (windows := request.window_page_ids) is not None:
                if task.state_page is not None:
                    block = task.start // self._config.stride
                    windows = [*windows[:block], task.state_page, *windows[block + 1 :]]
                self._window_pages.wrote(windows, tokens[number], task.start, is_known=is_known)


def _without_batch(record: Draw | Logprobs) -> Outcome:
    return Outcome(record=record, verdict=Verdict.NOT_COMPARED, detail="its batch is not there")


def _rows_of(
    record: Draw | Logprobs, num_rows: int, arrays: Mapping[str, Values], of_rows: Sequence[Task]
) -> tuple[list[int], list[Task]]:
    """Return the first `num_rows` rows of a batch that the record reads, and their tasks."""
    rows: list[int] = arrays["row_indices"][:num_rows].tolist()
    if any(row >= len(of_rows) for row in rows):
        raise DumpError(f"record {record.number} reads rows without a task")
    return rows, [of_rows[row] for row in rows]


def _no_fields(request: Request) -> array[int]:
    raise DumpError(f"the batch of {request.request_id} has no sampling fields")


def _task_of_step(first: Task, index: int) -> Task:
    """Return the task of a decode loop's step `index`, from its task of step 0."""
    return Task(first.request, first.start + index, (UNKNOWN_TOKEN,)) if index else first


def _chunk_tokens(runner: BatchRunner) -> int:
    """Return how many tokens one sequence may have in every prefill shape: as many as in the smallest."""
    prefills = (shape for shape in runner.buckets.smallest_shapes() if shape.layout is Layout.PREFILL)
    return min((shape.tokens // shape.rows for shape in prefills), default=runner.stride)
