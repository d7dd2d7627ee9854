"""Times the steps of greedy decode loops, with tokens and positions that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bench.gpu.entries import DEPTH, RecordedProgram, median_ms, seconds_of
from bench.gpu.models import Model
from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.self_test.last_tokens import loop_arguments
from shortfin_apps.llm.contract.abi import Entry, EntryFamily, Layout, argument_names
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, make_batch

MIN_SAMPLES = 3
_POSITIONS = argument_names(Layout.LOOP).index("positions")


def loop_sizes(entries: Iterable[str]) -> list[int]:
    """Return the numbers of rows of the decode loops among these entries."""
    parsed = [entry for name in entries if (entry := Entry.parse(name)) is not None]
    return sorted({each.rows or 0 for each in parsed if each.family is EntryFamily.DECODE_LOOP})


def measure(
    model: Model, rows: int, runner: BatchRunner, device: Device, program: RecordedProgram, sample_s: float
) -> dict[str, Any]:
    """Return step times in ms, up to the model's context: single steps, and `DEPTH` in flight."""
    tasks = _tasks(model, rows)
    _, arguments = loop_arguments(tasks, rows)
    blocks = max(len(task.page_ids) for task in tasks)
    runner.invoke(Shape(f"decode_loop_bs{rows}", Layout.LOOP, rows, rows, blocks), tasks, arguments)

    def median_step_ms(run: Callable[[RecordedProgram], None]) -> float:
        def sample() -> float:
            program.replace(_POSITIONS, device.upload(arguments["positions"]))
            return seconds_of(lambda: run(program))

        return median_ms(sample, MIN_SAMPLES, sample_s) / DEPTH

    sync_ms = median_step_ms(_one_at_a_time)
    queued_ms = median_step_ms(_all_at_once)
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


def _tasks(model: Model, rows: int) -> list[LlmTaskInput]:
    """Create decodes that are `DEPTH` steps short of the context, with pages for these steps."""
    made = make_batch(Plan(EntryFamily.DECODE, rows, 1, model.context), model.options.block_seq_stride)
    starts = [task.start_position - DEPTH for task in made.tasks]
    return [
        replace(task, start_position=start, seq_len=start + 1)
        for task, start in zip(made.tasks, starts, strict=True)
    ]


def _one_at_a_time(program: RecordedProgram) -> None:
    for _ in range(DEPTH):
        program.repeat().wait()


def _all_at_once(program: RecordedProgram) -> None:
    for pending in [program.repeat() for _ in range(DEPTH)]:
        pending.wait()
