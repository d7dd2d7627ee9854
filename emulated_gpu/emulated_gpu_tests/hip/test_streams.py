"""Streams and events: order, waiting, and what happens early or late within what they allow."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.hip.api import INVALID_HANDLE, INVALID_VALUE, NOT_READY, Handle, Hip, raises

WAIT_S = 10  # for what must happen; nothing asserts how soon


def late(control: Control) -> None:
    """Nothing runs from now on but what a waiting host needs."""
    control.command("order late")
    control.command("idle 60000")


def test_the_host_goes_on_while_work_waits(hip: Hip, fresh: Control) -> None:
    stream, event, called = hip.stream(), hip.event(), threading.Event()
    fresh.command("stall 0")
    kept = hip.call_host(stream, called.set)
    hip.call("hipEventRecord", event, stream)
    assert not hip.is_done(event)
    assert not called.is_set()
    fresh.command("resume 0")
    hip.call("hipEventSynchronize", event)
    assert called.is_set()
    assert hip.is_done(event)
    del kept


def test_copies_read_host_memory_when_they_run(hip: Hip, fresh: Control) -> None:
    late(fresh)
    stream, address, source = hip.stream(), hip.malloc(4), ctypes.create_string_buffer(b"old", 4)
    hip.copy_async(address, source, 4, stream)
    source.value = b"new"
    hip.synchronise(stream)
    assert hip.read(address, 4) == b"new\0"
    hip.call("hipFree", address)


def test_late_a_missing_wait_reads_what_is_not_written_yet(hip: Hip, fresh: Control) -> None:
    late(fresh)
    writer, reader, event = hip.stream(), hip.stream(), hip.event()
    address, seen = hip.malloc(4), ctypes.create_string_buffer(4)
    hip.fill_async(address, 7, 4, writer)
    hip.call("hipEventRecord", event, writer)
    hip.copy_async(seen, address, 4, reader)
    hip.synchronise(reader)
    assert seen.raw == b"\xff" * 4
    hip.call("hipStreamWaitEvent", reader, event, ctypes.c_uint(0))
    hip.copy_async(seen, address, 4, reader)
    hip.synchronise(reader)
    assert seen.raw == b"\x07" * 4
    hip.call("hipFree", address)


def test_late_work_runs_once_the_host_is_idle(hip: Hip, fresh: Control) -> None:
    fresh.command("order late")
    called = threading.Event()
    kept = hip.call_host(hip.stream(), called.set)
    assert called.wait(WAIT_S)
    del kept


def test_random_order_has_both_streams_first_now_and_then(hip: Hip, fresh: Control) -> None:
    assert {first_of_two(hip, fresh, seed) for seed in range(100)} == {"a", "b"}


def first_of_two(hip: Hip, control: Control, seed: int) -> str:
    control.command(f"seed {seed}")
    a, b = hip.stream(), hip.stream()
    order: list[str] = []
    control.command("stall 0")
    kept = [hip.call_host(a, lambda: order.append("a")), hip.call_host(b, lambda: order.append("b"))]
    control.command("resume 0")
    for stream in (a, b):
        hip.synchronise(stream)
        hip.call("hipStreamDestroy", stream)
    del kept
    return order[0]


def test_an_event_means_its_latest_record_and_a_wait_the_one_before_it(hip: Hip, fresh: Control) -> None:
    late(fresh)
    first, second, event = hip.stream(), hip.stream(), hip.event()
    order: list[str] = []
    kept = [hip.call_host(first, lambda: order.append("early"))]
    hip.call("hipEventRecord", event, first)
    hip.call("hipStreamWaitEvent", second, event, ctypes.c_uint(0))
    kept.append(hip.call_host(first, lambda: order.append("late")))
    hip.call("hipEventRecord", event, first)
    hip.synchronise(second)
    assert order == ["early"]
    assert not hip.is_done(event)
    hip.call("hipEventSynchronize", event)
    assert order == ["early", "late"]
    del kept


def test_an_event_that_was_never_recorded_is_done(hip: Hip) -> None:
    event = hip.event()
    assert hip.is_done(event)
    hip.call("hipEventSynchronize", event)
    hip.call("hipStreamWaitEvent", hip.stream(), event, ctypes.c_uint(0))


def test_a_destroyed_event_still_holds_who_waits_for_it(hip: Hip, fresh: Control) -> None:
    late(fresh)
    first, second, event = hip.stream(), hip.stream(), hip.event()
    order: list[int] = []
    kept = hip.call_host(first, lambda: order.append(1))
    hip.call("hipEventRecord", event, first)
    hip.call("hipStreamWaitEvent", second, event, ctypes.c_uint(0))
    hip.call("hipEventDestroy", event)
    hip.synchronise(second)
    assert order == [1]
    with raises(INVALID_HANDLE):
        hip.call("hipEventQuery", event)
    del kept


def test_a_destroyed_stream_ends_its_work_and_takes_no_more(hip: Hip, fresh: Control) -> None:
    stream, event, called = hip.stream(), hip.event(), threading.Event()
    fresh.command("stall 0")
    kept = hip.call_host(stream, called.set)
    hip.call("hipEventRecord", event, stream)
    hip.call("hipStreamDestroy", stream)
    with raises(INVALID_HANDLE):
        hip.synchronise(stream)
    fresh.command("resume 0")
    hip.call("hipEventSynchronize", event)
    assert called.is_set()
    del kept


def test_one_stream_can_stand_still_alone(hip: Hip, fresh: Control) -> None:
    hip.set_device(1)
    streams, events = [hip.stream(), hip.stream()], [hip.event(), hip.event()]
    number = fresh.library.emulated_gpu_stream_number(streams[0])
    fresh.command(f"stall 1 {number}")
    for stream, event in zip(streams, events, strict=True):
        hip.call("hipEventRecord", event, stream)
    hip.call("hipEventSynchronize", events[1])
    assert not hip.is_done(events[0])
    fresh.command(f"resume 1 {number}")
    hip.call("hipEventSynchronize", events[0])


def test_elapsed_time_needs_two_records_that_are_done(hip: Hip, fresh: Control) -> None:
    stream, start, stop, elapsed = hip.stream(), hip.event(), hip.event(), ctypes.c_float(-1)
    with raises(INVALID_HANDLE):
        hip.call("hipEventElapsedTime", ctypes.byref(elapsed), start, stop)
    late(fresh)
    hip.call("hipEventRecord", start, stream)
    hip.call("hipEventRecord", stop, stream)
    with raises(NOT_READY):
        hip.call("hipEventElapsedTime", ctypes.byref(elapsed), start, stop)
    hip.synchronise(stream)
    hip.call("hipEventElapsedTime", ctypes.byref(elapsed), start, stop)
    assert elapsed.value >= 0


def test_events_without_timing_have_no_elapsed_time(hip: Hip) -> None:
    events = [hip.make("hipEventCreateWithFlags", ctypes.c_uint(2)) for _ in range(2)]
    for event in events:
        hip.call("hipEventRecord", event, None)
        hip.call("hipEventSynchronize", event)
    with raises(INVALID_HANDLE):
        hip.call("hipEventElapsedTime", ctypes.byref(ctypes.c_float()), *events)


@pytest.mark.parametrize("bits", [16, 32])
def test_wide_fills(hip: Hip, bits: int) -> None:
    stream, address = hip.stream(), hip.malloc(64)
    value = {16: ctypes.c_uint16(0x1234), 32: ctypes.c_int32(0x12345678)}[bits]
    hip.call(f"hipMemsetD{bits}Async", address, value, 64 * 8 // bits, stream)
    hip.synchronise(stream)
    assert hip.read(address, 64) == bytes(value) * (64 * 8 // bits)
    hip.call("hipFree", address)


def test_a_call_from_a_host_function_is_reported(hip: Hip, fresh: Control) -> None:
    stream = hip.stream()
    kept = hip.call_host(stream, lambda: hip.library.hipGetDeviceCount(ctypes.byref(ctypes.c_int())))
    hip.synchronise(stream)
    assert [misuse.what for misuse in fresh.report().misuses] == ["hipGetDeviceCount"]
    del kept


def test_nonsense_handles_and_flags_are_refused(hip: Hip) -> None:
    with raises(INVALID_HANDLE):
        hip.synchronise(Handle(1))  # hipStreamLegacy
    with raises(INVALID_HANDLE):
        hip.call("hipStreamDestroy", None)
    with raises(INVALID_VALUE):
        hip.stream(flags=5)


def switches_of(thread_name: str) -> int:
    """How many times this process's thread of that name went to sleep."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == thread_name:
            status = (task / "status").read_text()
            return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    raise LookupError(thread_name)


def test_work_of_one_device_wakes_no_thread_of_another(hip: Hip) -> None:
    idle = ("gpu 1", "gpu host 0", "gpu host 1")
    stream, address = hip.stream(), hip.malloc(4)
    before = {name: switches_of(name) for name in idle}
    for value in range(100):
        hip.fill_async(address, value, 4, stream)
        hip.synchronise(stream)
    slept = {name: switches_of(name) - before[name] for name in idle}
    assert max(slept.values()) <= 1  # a thread may still go to sleep after the work of the test before
    hip.call("hipFree", address)


def test_a_stream_waits_for_another_device(hip: Hip, fresh: Control) -> None:
    first, address, seen = hip.stream(), hip.malloc(4), ctypes.create_string_buffer(4)
    hip.set_device(1)
    second = hip.stream()
    hip.set_device(0)
    for value in range(1, 20):
        fresh.command("stall 0")
        event = hip.event()
        hip.fill_async(address, value, 4, first)
        hip.call("hipEventRecord", event, first)
        hip.call("hipStreamWaitEvent", second, event, ctypes.c_uint(0))
        hip.copy_async(seen, address, 4, second)
        fresh.command("resume 0")
        hip.synchronise(second)
        assert seen.raw == bytes([value]) * 4
    hip.call("hipFree", address)
