"""Runs entries on padding rows alone, before a program serves: to check, to warm up and to time them."""

from __future__ import annotations

from collections.abc import Callable

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.runtime.device import EntrySignature, TensorType
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError, InvocationError


def warm_up(
    runner: BatchRunner, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[EntrySignature]:
    """Run every entry once on padding rows, so that first touches of memory delay no request.

    Returns a signature per entry with the types of the actual results; upstream's VMFBs declare no types.
    Calls `on_progress` with the number of entries done and the total. Raises ArtifactError if an entry
    does not accept the arguments that config.json describes.
    """
    shapes = runner.buckets.smallest_shapes()
    found: list[EntrySignature] = []
    for shape in shapes:
        on_progress(len(found), len(shapes))
        found.append(_first_run(runner, shape))
    on_progress(len(shapes), len(shapes))
    return found


def decode_s(runner: BatchRunner, num_runs: int) -> float:
    """Return the duration of a decode of one row, in seconds."""
    return shape_s(runner, runner.buckets.decode_of(1), num_runs)


def shape_s(runner: BatchRunner, shape: Shape, num_runs: int) -> float:
    """Return the shortest duration of `num_runs` warm invocations on padding rows, in seconds."""
    arguments, taken = runner.padding_arguments(shape), []
    for _ in range(num_runs):
        begin = runner.clock()
        runner.invoke_entry(shape.entry, arguments)
        taken.append(runner.clock() - begin)
    return min(taken)


def _first_run(runner: BatchRunner, shape: Shape) -> EntrySignature:
    try:
        results = runner.invoke_entry(shape.entry, runner.padding_arguments(shape))
    except DeviceLostError as error:
        raise type(error)(f"`{shape.entry}` failed in its first run: {error}") from error
    except InvocationError as error:
        reason = str(error).partition("\n")[0]
        raise ArtifactError(
            f"`{shape.entry}` failed in its first run; config.json may belong to another VMFB: check "
            f"`has_prefill_position` and `paged_kv_cache` there ({reason})"
        ) from error
    return EntrySignature(shape.entry, None, tuple(TensorType(r.shape, r.dtype) for r in results))
