"""All of HIP that IREE looks up is there, and errors have HIP's numbers and names."""

from __future__ import annotations

import ctypes

import pytest

from emulated_gpu.control import Control
from emulated_gpu_tests.hip.api import INVALID_VALUE, NOT_SUPPORTED, Hip, raises

# runtime/src/iree/hal/drivers/hip/dynamic_symbol_tables.h of IREE 3.9, and what later versions added.
IREE_3_9 = """
hipCtxGetCurrent hipCtxPopCurrent hipCtxPushCurrent hipCtxSetCurrent hipDeviceCanAccessPeer
hipDeviceEnablePeerAccess hipDeviceGet hipDeviceGetAttribute hipDeviceGetName hipDeviceGetUuid
hipDevicePrimaryCtxRelease hipDevicePrimaryCtxRetain hipDrvGraphAddMemcpyNode hipEventCreate
hipEventCreateWithFlags hipEventDestroy hipEventElapsedTime hipEventQuery hipEventRecord hipEventSynchronize
hipFree hipFreeAsync hipFuncGetAttribute hipFuncSetAttribute hipGetDeviceCount hipGetDeviceProperties
hipGetErrorName hipGetErrorString hipGraphAddEmptyNode hipGraphAddEventRecordNode hipGraphAddKernelNode
hipGraphAddMemsetNode hipGraphCreate hipGraphDestroy hipGraphExecDestroy hipGraphInstantiate hipGraphLaunch
hipHostFree hipHostGetDevicePointer hipHostMalloc hipHostRegister hipHostUnregister hipInit hipLaunchHostFunc
hipLaunchKernel hipMalloc hipMallocAsync hipMallocFromPoolAsync hipMallocManaged hipMemPoolCreate
hipMemPoolDestroy hipMemPoolGetAttribute hipMemPoolSetAttribute hipMemPoolTrimTo hipMemPrefetchAsync hipMemcpy
hipMemcpyAsync hipMemcpyHtoDAsync hipMemset hipMemsetAsync hipMemsetD16Async hipMemsetD32Async
hipMemsetD8Async hipModuleGetFunction hipModuleLaunchKernel hipModuleLoadData hipModuleLoadDataEx
hipModuleUnload hipSetDevice hipStreamCreateWithFlags hipStreamDestroy hipStreamSynchronize hipStreamWaitEvent
"""
LATER = ["hipGetLastError", "hipModuleGetGlobal"]


def test_every_symbol_of_iree_is_there(control: Control) -> None:
    symbols = IREE_3_9.split()
    assert len(symbols) == 73
    for name in symbols + LATER:
        assert hasattr(control.library, name), name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "hipSuccess"),
        (2, "hipErrorOutOfMemory"),
        (209, "hipErrorNoBinaryForGpu"),
        (600, "hipErrorNotReady"),
    ],
)
def test_error_names(control: Control, number: int, name: str) -> None:
    function = control.library.hipGetErrorName
    function.restype = ctypes.c_char_p
    assert function(number).decode() == name


def test_unknown_error_has_a_name(control: Control) -> None:
    control.library.hipGetErrorString.restype = ctypes.c_char_p
    assert control.library.hipGetErrorString(4711) == b"unknown error"


def test_last_error_is_kept_until_it_is_asked_for(hip: Hip) -> None:
    hip.library.hipGetLastError()
    with raises(INVALID_VALUE):
        hip.call("hipFree", 0x1234)
    assert hip.library.hipPeekAtLastError() == INVALID_VALUE
    assert hip.library.hipGetLastError() == INVALID_VALUE
    assert hip.library.hipGetLastError() == 0


def test_graphs_say_that_they_are_not_offered(hip: Hip) -> None:
    with raises(NOT_SUPPORTED):
        hip.make("hipGraphCreate", ctypes.c_uint(0))


def test_calls_are_counted_by_name(hip: Hip, fresh: Control) -> None:
    before = fresh.report().calls.get("hipMalloc", 0)
    hip.call("hipFree", hip.malloc(8))
    assert fresh.report().calls["hipMalloc"] == before + 1
