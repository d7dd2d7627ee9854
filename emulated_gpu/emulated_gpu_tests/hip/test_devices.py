"""Devices, contexts, attributes and properties."""

from __future__ import annotations

import ctypes
import struct
from contextlib import suppress

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.hip.api import (
    INVALID_DEVICE,
    NOT_SUPPORTED,
    PEER_ENABLED,
    Handle,
    Hip,
    HipError,
    raises,
)

MAX_BLOCK_X, SHARED_MEMORY, WARP_SIZE, POOLS = 26, 74, 87, 88


def attribute(hip: Hip, number: int, device: int = 0) -> int:
    value = ctypes.c_int()
    hip.call("hipDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(device))
    return value.value


def test_both_devices_are_counted(hip: Hip) -> None:
    count = ctypes.c_int()
    hip.call("hipGetDeviceCount", ctypes.byref(count))
    assert count.value == 2


@pytest.mark.parametrize(
    ("chip", "lanes", "lds"),
    [
        *(("gfx90a", 64, 65536), ("gfx942", 64, 65536), ("gfx950", 64, 163840)),
        *(("gfx1100", 32, 65536), ("gfx1201", 32, 65536)),
    ],
)
def test_attributes_and_properties_are_the_chip_s(
    hip: Hip, fresh: Control, chip: str, lanes: int, lds: int
) -> None:
    fresh.command(f"chip {chip}")
    assert (attribute(hip, WARP_SIZE), attribute(hip, SHARED_MEMORY)) == (lanes, lds)
    properties = ctypes.create_string_buffer(792)  # hipDeviceProp_t of ROCm 5
    hip.call("hipGetDeviceProperties", properties, ctypes.c_int(1))
    assert properties.raw[396:].split(b"\0")[0].decode() == chip
    assert struct.unpack_from("<QQii", properties.raw, 256) == (4 << 30, lds, 65536, lanes)


def test_attributes_iree_asks_for(hip: Hip) -> None:
    assert [attribute(hip, number) for number in (MAX_BLOCK_X, 27, 28, 9, POOLS)] == [1024, 1024, 1024, 0, 1]


def test_unknown_attribute_is_refused(hip: Hip) -> None:
    with raises(NOT_SUPPORTED):
        attribute(hip, 4711)
    with raises(INVALID_DEVICE):
        attribute(hip, POOLS, device=2)


def test_uuids_differ(hip: Hip) -> None:
    uuids = [ctypes.create_string_buffer(16) for _ in range(2)]
    for ordinal, uuid in enumerate(uuids):
        hip.call("hipDeviceGetUuid", uuid, ctypes.c_int(ordinal))
    assert uuids[0].raw != uuids[1].raw


def test_contexts_are_a_stack(hip: Hip) -> None:
    contexts = [hip.make("hipDevicePrimaryCtxRetain", ctypes.c_int(ordinal)) for ordinal in range(2)]
    hip.call("hipCtxPushCurrent", contexts[1])
    assert hip.make("hipCtxGetCurrent").value == contexts[1].value
    popped = Handle()
    hip.call("hipCtxPopCurrent", ctypes.byref(popped))
    assert popped.value == contexts[1].value
    assert hip.make("hipCtxGetCurrent").value == contexts[0].value


def test_peer_access_is_enabled_once(hip: Hip) -> None:
    can = ctypes.c_int()
    hip.call("hipDeviceCanAccessPeer", ctypes.byref(can), ctypes.c_int(0), ctypes.c_int(1))
    assert can.value == 1
    hip.set_device(1)
    with suppress(HipError):  # pipelines of other tests in this process have it enabled, which stays
        hip.call("hipDeviceEnablePeerAccess", ctypes.c_int(0), ctypes.c_uint(0))
    with raises(PEER_ENABLED):
        hip.call("hipDeviceEnablePeerAccess", ctypes.c_int(0), ctypes.c_uint(0))


def test_copies_between_devices(hip: Hip) -> None:
    first = hip.malloc(64)
    hip.write(first, bytes(range(64)))
    hip.set_device(1)
    second = hip.malloc(64)
    hip.call("hipMemcpy", second, first, 64, ctypes.c_int(3))
    assert hip.read(second, 64) == bytes(range(64))
    hip.call("hipFree", first)
    hip.call("hipFree", second)
