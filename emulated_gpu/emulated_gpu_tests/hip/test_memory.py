"""Allocations: fresh memory, what lies beyond an end, what is left after a free, and how much there is."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_gpu.control import Control
from emulated_gpu_tests.hip.api import (
    ALREADY_REGISTERED,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    Handle,
    Hip,
    raises,
)


def used(control: Control, device: int = 0) -> int:
    return control.report().devices[device].used_bytes


def test_fresh_memory_is_poisoned(hip: Hip) -> None:
    address = hip.malloc(5000)
    assert hip.read(address, 5000) == b"\xff" * 5000
    hip.call("hipFree", address)


@pytest.mark.parametrize("size", [1, 100, 4096, 4097])
def test_copies_end_with_the_allocation(hip: Hip, size: int) -> None:
    address = hip.malloc(size)
    assert len(hip.read(address, size)) == size
    for start, length in ((address, size + 1), (address - 1, 1), (address + size, 1), (address - 4096, 8)):
        with raises(INVALID_VALUE):
            hip.read(start, length)
    hip.call("hipFree", address)


def test_pages_around_an_allocation_are_inaccessible(hip: Hip) -> None:
    address = hip.malloc(4096)
    with pytest.raises(OSError, match="address"):  # EFAULT: the kernel reads for us
        _write_from(address + 4096)
    assert _write_from(address) == 8
    hip.call("hipFree", address)
    with pytest.raises(OSError, match="address"):
        _write_from(address)


def _write_from(address: int) -> int:
    """Lets the operating system read 8 bytes there, which fails where ours would end the process."""
    reader, writer = os.pipe()
    try:
        written = ctypes.CDLL(None, use_errno=True).write(
            writer, ctypes.c_void_p(address), ctypes.c_size_t(8)
        )
        if written < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(written)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_use_after_a_free_is_an_error_even_if_the_size_is_allocated_again(hip: Hip) -> None:
    old = hip.malloc(4096)
    hip.call("hipFree", old)
    new = hip.malloc(4096)
    with raises(INVALID_VALUE):
        hip.read(old, 1)
    with raises(INVALID_VALUE):
        hip.call("hipFree", old)
    hip.call("hipFree", new)


def test_free_of_nothing_is_allowed_and_of_the_middle_is_not(hip: Hip) -> None:
    hip.call("hipFree", None)
    address = hip.malloc(64)
    with raises(INVALID_VALUE):
        hip.call("hipFree", address + 8)
    hip.call("hipFree", address)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 1000), max_size=20), st.data())
def test_memory_in_use_is_the_sum_and_runs_out_exactly(
    control: Control, sizes: list[int], data: st.DataObject
) -> None:
    hip = Hip(control.library)
    before = used(control)
    limit = data.draw(st.integers(0, 10_000))
    control.command(f"memory 0 {before + limit}")
    kept: list[tuple[int, int]] = []
    for size in sizes:
        if sum(size for _, size in kept) + size > limit:
            with raises(OUT_OF_MEMORY):
                hip.malloc(size)
        else:
            kept.append((hip.malloc(size), size))
        assert used(control) == before + sum(size for _, size in kept)
    for address, _ in kept:
        hip.call("hipFree", address)
    assert used(control) == before
    control.command(f"memory 0 {4 << 30}")


def test_devices_have_memory_of_their_own_and_host_memory_counts_in_none(hip: Hip, fresh: Control) -> None:
    before = used(fresh, 0), used(fresh, 1)
    host = hip.make("hipHostMalloc", 1000, ctypes.c_uint(0))
    hip.set_device(1)
    address = hip.malloc(1000)
    assert (used(fresh, 0), used(fresh, 1)) == (before[0], before[1] + 1000)
    hip.call("hipFree", address)
    hip.call("hipHostFree", host)


def test_free_waits_for_the_device(hip: Hip, fresh: Control) -> None:
    address, stream = hip.malloc(64), hip.stream()
    fresh.command("stall 0")
    hip.fill_async(address, 1, 64, stream)
    freeing = threading.Thread(target=hip.call, args=("hipFree", address), daemon=True)
    freeing.start()
    freeing.join(0.05)
    assert freeing.is_alive()
    assert used(fresh) >= 64
    fresh.command("resume 0")
    freeing.join(10)
    assert not freeing.is_alive()


# ---- in stream order


def test_memory_of_a_stream_is_live_from_its_turn_to_that_of_its_free(hip: Hip, fresh: Control) -> None:
    before, stream = used(fresh), hip.stream()
    fresh.command("stall 0")
    address = hip.make("hipMallocAsync", 64, stream).value or 0
    assert used(fresh) == before + 64
    buffer = ctypes.create_string_buffer(64)
    hip.copy_async(buffer, address, 64, stream)
    hip.call("hipFreeAsync", address, stream)
    fresh.command("resume 0")
    hip.synchronise(stream)
    assert buffer.raw == b"\xff" * 64
    assert used(fresh) == before


def test_another_stream_that_does_not_wait_for_the_allocation_fails(hip: Hip, fresh: Control) -> None:
    first, second = hip.stream(), hip.stream()
    fresh.command("order late")
    fresh.command("idle 60000")
    address = hip.make("hipMallocAsync", 64, first).value or 0
    hip.fill_async(address, 1, 64, second)
    with raises(ILLEGAL_ADDRESS):
        hip.synchronise(second)
    assert "no longer (or not yet)" in fresh.report().misuses[0].text


def test_pools_count_what_is_in_use(hip: Hip, fresh: Control) -> None:
    properties = ctypes.create_string_buffer(88)  # all zero: device 0
    pool, stream = hip.make("hipMemPoolCreate", properties), hip.stream()
    address = hip.make("hipMallocFromPoolAsync", 1000, pool, stream)
    assert pool_attribute(hip, pool, 7) == 1000
    hip.call("hipFreeAsync", address, stream)
    hip.synchronise(stream)
    assert (pool_attribute(hip, pool, 7), pool_attribute(hip, pool, 8)) == (0, 1000)
    hip.call("hipMemPoolDestroy", pool)


def pool_attribute(hip: Hip, pool: Handle, number: int) -> int:
    value = ctypes.c_uint64()
    hip.call("hipMemPoolGetAttribute", pool, ctypes.c_int(number), ctypes.byref(value))
    return value.value


def test_a_second_free_in_stream_order_is_reported(hip: Hip, fresh: Control) -> None:
    stream = hip.stream()
    address = hip.make("hipMallocAsync", 64, stream)
    fresh.command("stall 0")
    hip.call("hipFreeAsync", address, stream)
    hip.call("hipFreeAsync", address, stream)
    fresh.command("resume 0")
    hip.synchronise(stream)
    assert [misuse.what for misuse in fresh.report().misuses] == ["hipFreeAsync"]


# ---- of the host


def test_registered_memory_has_a_device_address_until_it_is_unregistered(hip: Hip) -> None:
    buffer = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(buffer)
    with raises(INVALID_VALUE):
        hip.make("hipHostGetDevicePointer", address, ctypes.c_uint(0))
    hip.call("hipHostRegister", address, 8192, ctypes.c_uint(2))
    assert hip.make("hipHostGetDevicePointer", address, ctypes.c_uint(0)).value == address
    with raises(ALREADY_REGISTERED):
        hip.call("hipHostRegister", address + 4096, 8192, ctypes.c_uint(2))
    hip.call("hipHostUnregister", address)
    with raises(NOT_REGISTERED):
        hip.call("hipHostUnregister", address)
