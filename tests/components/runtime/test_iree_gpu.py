"""The context of the thread that opened a device becomes current in every thread that uses it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from shortfin_apps.llm.components.runtime.iree_gpu import CudaContext

OF_IREE = 0x1234


class Driver:
    """Keeps a context for each thread, as CUDA's driver does."""

    def __init__(self) -> None:
        self.current: dict[int, int | None] = {threading.get_ident(): OF_IREE}
        self.num_set = 0
        self.status = 0

    def cuCtxGetCurrent(self, out: Any) -> int:
        out._obj.value = self.current.get(threading.get_ident())
        return self.status

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = 700, 1000
        return self.status

    def cuCtxGetDevice(self, out: Any) -> int:
        out._obj.value = 3
        return self.status

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
        assert device.value == 3
        out._obj.value = {16: 132}[attribute]
        return self.status

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.num_set += 1
        self.current[threading.get_ident()] = context.value
        return self.status


def test_another_thread_gets_the_context_once() -> None:
    driver = Driver()
    context = CudaContext(driver)
    seen = []

    def work() -> None:
        for _ in range(3):
            context.enter()
            seen.append(driver.current[threading.get_ident()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    context.enter()  # on the thread that has it
    assert seen == [OF_IREE] * 3
    assert driver.num_set == 1


def test_a_tenth_of_the_memory_is_not_spare() -> None:
    assert CudaContext(Driver()).spare_bytes() == 700 - 100


def test_multiprocessors_are_those_of_the_contexts_device() -> None:
    driver = Driver()
    context = CudaContext(driver)
    assert context.compute_units() == 132
    driver.status = 1
    assert context.compute_units() is None


def test_a_refusal_is_an_error() -> None:
    driver = Driver()
    context = CudaContext(driver)
    driver.status = 201
    errors = []

    def work() -> None:
        with pytest.raises(RuntimeError, match="CUDA driver error 201"):
            context.enter()
        errors.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors
