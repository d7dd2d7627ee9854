"""Faults on demand: each strikes when it was asked to, as HIP would show it, and only then."""

from __future__ import annotations

import ctypes
import threading

import pytest

from emulated_gpu.control import Control
from emulated_gpu.errors import EmulatedGpuError
from emulated_gpu_tests.hip.api import NO_DEVICE, OUT_OF_MEMORY, Hip, raises


def test_the_nth_call_fails_and_no_other(hip: Hip, fresh: Control) -> None:
    fresh.command("fail hipStreamCreateWithFlags 2 999")
    hip.stream()
    with raises(999):
        hip.stream()
    hip.stream()


def test_the_nth_allocation_of_any_kind_fails(hip: Hip, fresh: Control) -> None:
    fresh.command(f"fail allocation 2 {OUT_OF_MEMORY}")
    address = hip.malloc(8)
    with raises(OUT_OF_MEMORY):
        hip.make("hipHostMalloc", 8, ctypes.c_uint(0))
    hip.call("hipFree", address)


def test_forgotten_faults_do_not_strike(hip: Hip, fresh: Control) -> None:
    fresh.command("fail hipMalloc 1 2")
    fresh.command("forget")
    hip.call("hipFree", hip.malloc(8))


def test_a_lost_device_fails_whoever_waits_and_every_later_call(hip: Hip, fresh: Control) -> None:
    stream, errors = hip.stream(), []
    fresh.command("stall 0")
    address, called = hip.malloc(8), threading.Event()
    kept = hip.call_host(stream, called.set)

    def wait() -> None:
        errors.append(hip.library.hipStreamSynchronize(stream))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    fresh.command("lose 0")
    waiting.join(10)
    assert errors == [NO_DEVICE]
    assert not called.is_set()
    for function, *arguments in (("hipMalloc", ctypes.byref(ctypes.c_void_p()), 8), ("hipEventQuery", None)):
        with raises(NO_DEVICE):
            hip.call(str(function), *arguments)
    hip.set_device(1)
    hip.call("hipFree", hip.malloc(8))
    fresh.command("revive 0")
    fresh.command("resume 0")
    hip.set_device(0)
    hip.call("hipFree", address)
    del kept


@pytest.mark.parametrize(
    "command",
    [
        *("nonsense", "fail hipMalloc", "fail hipMalloc 0 2", "fail hipMalloc one 2", "stall 2"),
        *("stall 0 4711", "order early", "chip gfx908", "memory 0", "a b c d e f", "seed x"),
    ],
)
def test_commands_that_are_not_understood(fresh: Control, command: str) -> None:
    with pytest.raises(EmulatedGpuError, match="not understood"):
        fresh.command(command)
