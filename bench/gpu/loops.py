"""Times the steps of greedy decode loops, with state that stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bench.gpu.entries import DEPTH, RecordedProgram, median_ms, seconds_of
from bench.gpu.models import Model
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.decode_loop import DecodeLoop
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.contract.abi import Entry, EntryFamily
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, make_batch

MIN_SAMPLES = 3


def loop_sizes(entries: Iterable[str]) -> list[int]:
    """Return the numbers of rows of the decode loops among these entries."""
    parsed = [entry for name in entries if (entry := Entry.parse(name)) is not None]
    return sorted({each.rows or 0 for each in parsed if each.family is EntryFamily.DECODE_LOOP})


def measure(
    model: Model, rows: int, runner: BatchRunner, program: RecordedProgram, sample_s: float
) -> dict[str, Any]:
    """Return step times in ms, up to the model's context: single steps, and `DEPTH` in flight."""
    batch = _batch(model, rows)
    sampling = [sampling_fields(task.request, runner.num_candidates) for task in batch.tasks]

    def start() -> DecodeLoop:
        loop = runner.start_loop(batch, sampling)
        assert loop is not None, "there is a loop of so many rows"
        return loop

    sync_ms = _median_ms(start, _one_at_a_time, sample_s)
    queued_ms = _median_ms(start, _all_at_once, sample_s)
    return {
        "entry": program.last_entry,
        "rows": rows,
        "new_tokens": rows,
        "context": model.context,
        "run_ms": sync_ms,
        "sync_ms": sync_ms,
        "queued_ms": queued_ms,
        "tokens_per_s": rows / queued_ms * 1e3,
    }


def _batch(model: Model, rows: int) -> Batch:
    """Create decodes that are `DEPTH` steps short of the context, with pages for these steps."""
    made = make_batch(Plan(EntryFamily.DECODE, rows, 1, model.context), model.options.block_seq_stride)
    return Batch(EntryFamily.DECODE, tuple(_running(task) for task in made.tasks))


def _running(task: LlmTaskInput) -> LlmTaskInput:
    """Give the task's request a lease on its pages, as a loop reads it from the request."""
    start = task.start_position - DEPTH
    task.request.lease = Lease(page_ids=list(task.page_ids), window_page_ids=list(task.page_ids))
    task.request.num_computed = start
    return replace(task, start_position=start, seq_len=start + 1)


def _one_at_a_time(loop: DecodeLoop) -> None:
    for _ in range(DEPTH):
        loop.queue()
        loop.wait()


def _all_at_once(loop: DecodeLoop) -> None:
    for _ in range(DEPTH):
        loop.queue()
    for _ in range(DEPTH):
        loop.wait()


def _median_ms(start: Callable[[], DecodeLoop], run: Callable[[DecodeLoop], None], sample_s: float) -> float:
    """Return the median time of a step, with a new loop for each sample."""

    def sample() -> float:
        loop = start()
        return seconds_of(lambda: run(loop))

    return median_ms(sample, MIN_SAMPLES, sample_s) / DEPTH
