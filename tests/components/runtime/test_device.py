"""The contract of `Device`, for both runtimes and for the (emulated) GPU."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shortfin_apps.llm.components.invocation.invoker import Invoker
from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.device import Array, Device, DeviceBuffer, Program, TensorType
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.errors import InvocationError
from tests.runtimes import RUNTIMES

from .conftest import WEIGHT

pytestmark = pytest.mark.timeout(60)

F32 = np.dtype(np.float32)


def vector(value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(8, value, np.float32)


def slow_shape(program: Program) -> tuple[int, ...]:
    """The shape of `slow`'s argument, which is smaller on the emulated GPU."""
    signature = program.entries["slow"]
    assert signature.arguments is not None
    return tuple(size for size in signature.arguments[0].shape if size is not None)


def test_entries_are_listed_without_suffix_and_with_their_types(program: Program) -> None:
    assert program.entries["accumulate"].arguments == (TensorType((8,), F32), TensorType((8,), F32))
    assert program.entries["accumulate"].results == (TensorType((8,), F32),)
    assert program.entries["accumulate"].only_dispatches
    assert not program.entries["double_bf16"].only_dispatches
    arguments = program.entries["double_bf16"].arguments
    assert arguments == (TensorType((None, 2), np.dtype(ml_dtypes.bfloat16)),)
    assert not any(name.startswith("__") or name.endswith("$async") for name in program.entries)


def test_an_unknown_entry_raises_key_error(program: Program) -> None:
    with pytest.raises(KeyError):
        program.submit("no_such_entry", [])


@pytest.mark.parametrize("name", ["i64", "i32", "f32", "f16", "bf16"])
def test_every_dtype_survives_a_round_trip(device: Device, program: Program, name: str) -> None:
    dtype = MLIR_DTYPES[name]
    array: Array = np.arange(6).reshape(3, 2).astype(dtype)
    (result,) = program.submit(f"double_{name}", [device.upload(array)]).wait()
    doubled = device.download(result)
    assert doubled.dtype == array.dtype == result.dtype
    assert doubled.shape == (3, 2) == result.shape
    np.testing.assert_array_equal(doubled, array + array)


def test_upload_copies_its_argument(device: Device, program: Program) -> None:
    array = np.ones((1, 2), np.int64)
    buffer = device.upload(array)
    array[:] = 7
    np.testing.assert_array_equal(device.download(buffer), [[1, 1]])
    (result,) = program.submit("double_i64", [buffer]).wait()
    np.testing.assert_array_equal(device.download(result), [[2, 2]])


def test_a_buffer_may_be_two_arguments(device: Device, program: Program) -> None:
    buffer = device.upload(vector(3))
    program.submit("accumulate", [buffer, buffer]).wait()
    np.testing.assert_array_equal(device.download(buffer), vector(3 + 2 * 3))


def test_upload_takes_any_memory_layout(device: Device) -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(device.download(device.upload(array)), array)


@pytest.mark.parametrize("only_dispatches", [False, True])
def test_clear_zeroes_only_the_given_rows(device: Device, program: Program, only_dispatches: bool) -> None:
    slab = device.allocate((8,), F32, only_dispatches=only_dispatches)
    program.submit("accumulate", [device.upload(vector(3)), slab]).wait()
    device.clear(slab, [1, 6])
    np.testing.assert_array_equal(device.download(slab), [3, 0, 3, 3, 3, 3, 0, 3])
    program.submit("accumulate", [device.upload(vector(1)), slab]).wait()
    np.testing.assert_array_equal(device.download(slab), [7, 1, 7, 7, 7, 7, 1, 7])
    pages = device.allocate((3, 64), np.dtype(ml_dtypes.bfloat16), only_dispatches=only_dispatches)
    device.clear(pages, [2])
    assert not device.download(pages).astype(np.float32).any()


@pytest.mark.parametrize("only_dispatches", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fnuz])
def test_allocated_memory_is_zero_even_when_recycled(
    device: Device, dtype: type, only_dispatches: bool
) -> None:
    for _ in range(2):
        slab = device.allocate((3, 64), np.dtype(dtype), only_dispatches=only_dispatches)
        assert slab.shape == (3, 64)
        assert not device.download(slab).astype(np.float32).any()
        del slab
        device.upload(np.full((3, 64), 1, dtype))


@pytest.mark.parametrize("only_dispatches", [False, True])
def test_submissions_run_in_order_on_a_cache_they_mutate(
    device: Device, program: Program, only_dispatches: bool
) -> None:
    cache = device.allocate((8,), F32, only_dispatches=only_dispatches)
    pending = [program.submit("accumulate", [device.upload(vector(i)), cache]) for i in range(12)]
    expected = 0.0
    for i, step in enumerate(pending):
        expected = 2 * expected + i
        (result,) = step.wait()
        np.testing.assert_array_equal(device.download(result), expected + WEIGHT)
    np.testing.assert_array_equal(device.download(cache), vector(expected))


def test_results_can_be_arguments(device: Device, program: Program) -> None:
    first = program.submit("double_i64", [device.upload(np.ones((1, 2), np.int64))])
    (result,) = program.submit("double_i64", first.wait()).wait()
    np.testing.assert_array_equal(device.download(result), [[4, 4]])


def test_arguments_live_until_the_invocation_ends(device: Device, program: Program) -> None:
    """No reference to the uploads or the pending is kept; free memory is overwritten meanwhile."""
    slow = device.upload(np.zeros(slow_shape(program), np.float32))
    cache = device.allocate((8,), F32)
    program.submit("slow", [slow])
    for i in range(4):
        program.submit("accumulate", [device.upload(vector(i)), cache])
        gc.collect()
        for _ in range(8):
            device.upload(vector(99))
    program.submit("accumulate", [device.upload(vector(4)), cache]).wait()
    np.testing.assert_array_equal(device.download(cache), vector(((0 * 2 + 1) * 2 + 2) * 4 + 3 * 2 + 4))


def test_many_submissions_with_fresh_uploads_never_deadlock(device: Device, program: Program) -> None:
    """Upstream's server hangs here: it allocates behind unflushed work, holding the GIL."""
    image = device.upload(np.zeros(slow_shape(program), np.float32))
    pending = []
    for i in range(6):
        pending.append(program.submit("slow", [image]))
        pending.append(program.submit("double_i64", [device.upload(np.full((1, 2), i, np.int64))]))
    results = [device.download(step.wait()[0]) for step in pending[1::2]]
    assert [int(result[0, 0]) for result in results] == [0, 2, 4, 6, 8, 10]


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Sets the switch interval so long that a thread gets the GIL only when another releases it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_forced_switches")
def test_waiting_releases_the_gil(device: Device, program: Program) -> None:
    image = device.upload(np.ones(slow_shape(program), np.float32))
    rounds, stop = [0], threading.Event()

    def run() -> None:
        while not stop.is_set():
            rounds[0] += 1
            time.sleep(0)  # gives the lock up

    def wait_until_it_ran(submissions: int) -> None:
        """Waits for invocations until the other thread ran meanwhile: a busy machine delays its turn."""
        before = rounds[0]
        for _ in range(100):
            for _ in range(submissions - 1):
                program.submit("slow", [image])
            program.submit("slow", [image]).wait()
            if rounds[0] > before:
                return
        pytest.fail(f"no other thread ran during 100 waits for {submissions} invocations")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until_it_ran(submissions=1)
        wait_until_it_ran(submissions=2)
    finally:
        stop.set()
        thread.join()


def test_other_threads_may_use_the_device(device: Device, program: Program) -> None:
    seen: list[int] = []

    def run(value: int) -> None:
        for _ in range(5):
            buffer = device.upload(np.full((1, 2), value, np.int64))
            seen.append(int(device.download(program.submit("double_i64", [buffer]).wait()[0])[0, 0]))

    threads = [threading.Thread(target=run, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [2] * 5 + [4] * 5 + [6] * 5


def test_later_invocations_run_after_a_failed_one(fallible_device: Device, fallible_program: Program) -> None:
    cache = fallible_device.allocate((8,), F32)

    def accumulate() -> Any:
        return fallible_program.submit("accumulate", [fallible_device.upload(vector(1)), cache])

    wrong = fallible_device.upload(np.zeros(3, np.int64))
    bad: list[list[DeviceBuffer]] = [[wrong, cache], [fallible_device.upload(np.zeros(9, np.float32)), cache]]
    for arguments in bad:
        before = accumulate()
        failing = fallible_program.submit("accumulate", arguments)
        after = accumulate()
        before.wait()
        with pytest.raises(InvocationError, match=r"mismatch|INVALID_ARGUMENT"):
            failing.wait()
        after.wait()
    np.testing.assert_array_equal(fallible_device.download(cache), vector(15))


def test_an_assertion_inside_an_entry_fails_that_invocation(
    fallible_device: Device, fallible_program: Program
) -> None:
    with pytest.raises(InvocationError, match="negative"):
        fallible_program.submit("refuse_negative", [fallible_device.upload(np.array([-1]))]).wait()
    (result,) = fallible_program.submit("refuse_negative", [fallible_device.upload(np.array([1]))]).wait()
    assert fallible_device.download(result)[0] == 1


def test_repeated_failures_do_no_harm(fallible_device: Device, fallible_program: Program) -> None:
    cache = fallible_device.allocate((8,), F32)
    for _ in range(40 if fallible_device.name == "local-task" else 6):  # shortfin: see its module
        with pytest.raises(InvocationError):
            fallible_program.submit(
                "accumulate", [fallible_device.upload(np.zeros(3, np.int64)), cache]
            ).wait()
    fallible_program.submit("accumulate", [fallible_device.upload(vector(1)), cache]).wait()
    np.testing.assert_array_equal(fallible_device.download(cache), vector(1))


def test_an_entry_without_fences_runs(device: Device, folder: Path) -> None:
    program = device.load_program(folder / "unfenced.vmfb", [], "plain")
    pending = [program.submit("negate", [device.upload(np.full(4, i, np.float32))]) for i in range(3)]
    for i, step in enumerate(pending):
        np.testing.assert_array_equal(device.download(step.wait()[0]), np.full(4, -i, np.float32))


def test_invocations_reuse_freed_memory(device: Device, program: Program) -> None:
    """Without a caching allocator every call page-faults on 7 MB of new buffers: 1,800 pages."""
    image = device.upload(np.ones(slow_shape(program), np.float32))
    for _ in range(3):
        program.submit("slow", [image]).wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        program.submit("slow", [image]).wait()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_close_waits_for_invocations_in_flight(runtime: Runtime, artefacts: Path) -> None:
    device = open_device("cpu", runtime)
    program = device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")
    program.submit("slow", [device.upload(np.ones(slow_shape(program), np.float32))])
    pending = program.submit("double_i64", [device.upload(np.ones((1, 2), np.int64))])
    device.close()
    pending.wait()
    device.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_closed_device_needs_no_search_for_garbage(runtime: Runtime, artefacts: Path) -> None:
    """With it go the buffers of its driver."""
    device = open_device("cpu", runtime)
    program = device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")
    (result,) = program.submit("double_i64", [device.upload(np.ones((1, 2), np.int64))]).wait()
    gc.disable()
    try:
        device.close()
        freed = weakref.ref(device)
        del device, program, result
        assert freed() is None
    finally:
        gc.enable()


def test_an_entry_whose_memory_is_its_callers_says_how_much_it_needs(device: Device, folder: Path) -> None:
    program = device.load_program(folder / "owned.vmfb", [], "m")
    assert list(program.entries) == ["f"]  # and not the function that computes the size
    assert program.entries["f"].workspace_bytes == 8 * 64 * 4
    x = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    (y,) = Invoker(device, program).submit("f", [device.upload(x)]).wait()
    expected = np.repeat(x.sum(axis=1, keepdims=True) * 16, 64, axis=1)
    np.testing.assert_array_equal(device.download(y), expected)
