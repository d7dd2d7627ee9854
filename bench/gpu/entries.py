"""Times each entry, called with arguments that are already on the device.

The package's own runner runs a case once; its invocation is recorded and then repeated unchanged.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.models import Model
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import widest
from shortfin_apps.llm.components.runtime.device import DeviceBuffer, EntrySignature, Pending, Program
from shortfin_apps.llm.contract.abi import EntryFamily, SamplingField
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, make_batch

MIN_CALLS = 5
MIN_QUEUES = 2  # of DEPTH calls each
DEPTH = 20  # queued invocations in flight


@dataclass(frozen=True, slots=True)
class Case:
    """A batch to run: tasks with `new_tokens` in total, decodes at `context`."""

    batch: Batch
    new_tokens: int
    context: int

    @property
    def rows(self) -> int:
        return len(self.batch.tasks)


class RecordedProgram:
    """A program that records its last invocation, to repeat it with the same arguments."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._last: tuple[str, list[DeviceBuffer]] | None = None

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._program.entries

    @property
    def last_entry(self) -> str:
        assert self._last is not None, "nothing has been invoked"
        return self._last[0]

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        self._last = (entry, list(arguments))
        return self._program.submit(entry, arguments)

    def replace(self, index: int, argument: DeviceBuffer) -> None:
        """Replace an argument of the recorded invocation."""
        assert self._last is not None, "nothing has been invoked"
        self._last[1][index] = argument

    def repeat(self) -> Pending:
        assert self._last is not None, "nothing has been invoked"
        return self._program.submit(*self._last)


def cases(model: Model, *, has_extend: bool) -> Iterator[Case]:
    """Yield a full batch of every decode and draft entry, the model's prefills, and its extends."""
    stride = model.options.block_seq_stride
    for rows in model.options.decode_batch_sizes:
        plan = Plan(EntryFamily.DECODE, rows, 1, model.context)
        yield Case(make_batch(plan, stride), rows, model.context)
    for rows, tokens in model.prefills:
        yield Case(make_batch(Plan(EntryFamily.PREFILL, rows, tokens, tokens), stride), rows * tokens, tokens)
    for rows in model.options.decode_batch_sizes if model.spec.draft else ():
        yield Case(make_batch(Plan(EntryFamily.DRAFT, rows, 1, model.context), stride), rows, model.context)
    for prompt, decodes in model.extends if has_extend else ():
        yield Case(_extend(prompt, decodes, model.context, stride), prompt + decodes, model.context)


def _extend(prompt: int, decodes: int, context: int, stride: int) -> Batch:
    """Create a batch of one prompt with `prompt` tokens and `decodes` decodes, on separate pages."""
    tasks: list[LlmTaskInput] = []
    for plan in (
        Plan(EntryFamily.EXTEND, min(prompt, 1), prompt, prompt),
        Plan(EntryFamily.EXTEND, decodes, 1, context),
    ):
        used = sum(len(task.page_ids) for task in tasks)
        made = make_batch(plan, stride).tasks if plan.rows else ()
        for task in made:
            page_ids = [used + page for page in task.page_ids]
            tasks.append(replace(task, page_ids=page_ids, window_page_ids=page_ids))
    return Batch(EntryFamily.EXTEND, tuple(tasks))


def pages(all_cases: Sequence[Case]) -> int:
    """Return the number of pages for the largest case, plus the scratch page."""
    return 1 + max(sum(len(task.page_ids) for task in case.batch.tasks) for case in all_cases)


def measure(case: Case, runner: BatchRunner, program: RecordedProgram, sample_s: float) -> dict[str, Any]:
    """Return times of an invocation in ms: the runner's `run`, single calls, and queued calls."""
    if case.batch.family is EntryFamily.DRAFT:
        shape = runner.buckets.draft(case.rows, widest(case.batch.tasks))
        return _times(case, lambda: runner.run_as(shape, case.batch), program, sample_s)
    return _times(case, lambda: runner.run(case.batch), program, sample_s)


def measure_logprobs(
    case: Case, runner: BatchRunner, program: RecordedProgram, sample_s: float
) -> dict[str, Any]:
    """Return the same of the `logprobs` entry that reads a decode's rows; the decode is not timed."""
    runner.slots.resize(case.rows)
    launch = runner.launch(case.batch)
    slots = {row: row for row in range(case.rows)}

    def run() -> None:
        for each in runner.launch_logprobs(launch, slots):
            runner.terms(each)

    return _times(case, run, program, sample_s)


def measure_draws(
    case: Case, runner: BatchRunner, program: RecordedProgram, sample_s: float
) -> dict[str, Any]:
    """Return the same of the `sample` entry that draws greedy tokens from a decode's rows."""
    runner.slots.resize(case.rows)
    launch = runner.launch(case.batch)
    fields = array("q", [0] * len(SamplingField))
    fields[SamplingField.TOP_K] = 1

    def run() -> None:
        runner.draw(launch, range(case.rows), lambda _: fields, ())

    return _times(case, run, program, sample_s)


def _times(
    case: Case, run: Callable[[], object], program: RecordedProgram, sample_s: float
) -> dict[str, Any]:
    run_ms = median_ms(lambda: seconds_of(run), MIN_CALLS, sample_s)
    sync_ms = median_ms(lambda: seconds_of(lambda: program.repeat().wait()), MIN_CALLS, sample_s)
    queued_ms = median_ms(lambda: seconds_of(lambda: _queue(program)), MIN_QUEUES, sample_s) / DEPTH
    return {
        "entry": program.last_entry,
        "rows": case.rows,
        "new_tokens": case.new_tokens,
        "context": case.context,
        "run_ms": run_ms,
        "sync_ms": sync_ms,
        "queued_ms": queued_ms,
        "tokens_per_s": case.new_tokens / queued_ms * 1e3,
    }


def _queue(program: RecordedProgram) -> None:
    in_flight = [program.repeat() for _ in range(DEPTH)]
    for pending in in_flight:
        pending.wait()


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median_ms(sample: Callable[[], float], min_samples: int, sample_s: float) -> float:
    """Return the median of enough samples, after a warm-up sample."""
    sample()
    times: list[float] = []
    while len(times) < min_samples or sum(times) < sample_s:
        times.append(sample())
    return statistics.median(times) * 1e3
