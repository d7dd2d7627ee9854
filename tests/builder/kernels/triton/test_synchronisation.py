"""Order between the waves of a workgroup and between workgroups, read from the machine code."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest

from emulated_gpu.chips import CHIPS as EMULATED
from emulated_gpu.machine_code.code_object import read_code_object
from emulated_gpu.machine_code.decode import Shape, decode
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from tests.code_objects import CHIPS
from tests.hip import EmulatedGpus

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.triton.counted_sums import counted_sums, overtaken_sums

SHARES, SIZE = 4, 1024
KERNEL = Kernel(
    name="counted_sums",
    function=counted_sums,
    interface=Interface(
        constants=(),
        reads={"x": buffer("f32", SHARES, SIZE)},
        writes={
            "parts": buffer("f32", SHARES, SIZE),
            "counter": buffer("i32", 1),
            "total": buffer("f32", SIZE),
        },
    ),
    constexprs={"SHARES": SHARES, "SIZE": SIZE},
    grid=[SHARES],
)


def waits_for_all_stores(shape: Shape) -> bool:
    """CDNA counts stores with loads, in bits 0 to 3, 14 and 15 of the operand; RDNA separately."""
    match shape.mnemonic:
        case "s_waitcnt":
            return not shape.fields["simm16"] & 0xC00F
        case "s_waitcnt_vscnt" | "s_wait_storecnt":
            return shape.fields["simm16"] == 0
    return False


# `read_code_object` does not know gfx908, but its stores, waits and barriers have the encoding of gfx90a.
OLDER_CHIP, ITS_NUMBER, GFX90A = "gfx908", 0x30, 0x3F
CHIP_NUMBER = 48  # the byte in an ELF header that has a chip's number


def shapes_of(chip: str) -> list[Shape]:
    """The instructions of the kernel."""
    image = bytearray(compile_kernel(KERNEL, "amdgpu", chip).image)
    if chip == OLDER_CHIP:
        assert image[CHIP_NUMBER] == ITS_NUMBER
        chip, image[CHIP_NUMBER] = "gfx90a", GFX90A
    (kernel,) = read_code_object(bytes(image)).kernels
    return [each.shape for each in decode(kernel.code, kernel.entry, EMULATED[chip].instruction_set)]


@pytest.mark.parametrize("chip", [OLDER_CHIP, *CHIPS])
def test_every_wave_waits_for_its_stores_before_the_workgroup_counts(chip: str) -> None:
    shapes = shapes_of(chip)
    before_count = list(takewhile(lambda shape: "atomic_add" not in shape.mnemonic, shapes))
    assert len(before_count) < len(shapes)
    last_store = max(i for i, shape in enumerate(before_count) if "_store_" in shape.mnemonic)
    before_barrier = takewhile(
        lambda shape: not shape.mnemonic.startswith("s_barrier"), before_count[last_store + 1 :]
    )
    waits = [waits_for_all_stores(shape) for shape in before_barrier]
    assert any(waits)
    assert len(waits) < len(before_count) - last_store - 1  # a barrier follows


def run_emulated(kernel: Kernel, chip: str, gpus: EmulatedGpus) -> tuple[np.ndarray, set[str]]:
    """Run a kernel through HIP; return its total, the sum of rows of ones, and the kinds of findings."""
    gpus.set_chip(chip)
    gpus.control.clear_report()
    hip, compiled = gpus.control.library, compile_kernel(kernel, "amdgpu", chip)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert hip.hipModuleLoadData(ctypes.byref(module), compiled.image) == 0
    (name,) = (each.name for each in read_code_object(compiled.image).kernels)
    assert hip.hipModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0
    x = np.ones((SHARES, SIZE), np.float32)
    memory = [ctypes.c_void_p() for _ in range(4)]
    for at, content in zip(memory, (x, x * 0, np.zeros(1, np.int32), x[0] * 0), strict=True):
        assert hip.hipMalloc(ctypes.byref(at), ctypes.c_size_t(content.nbytes)) == 0
        data = ctypes.c_char_p(content.tobytes())
        assert hip.hipMemcpy(at, data, ctypes.c_size_t(content.nbytes), 4) == 0
    parameters = (ctypes.c_void_p * 8)(*(ctypes.cast(ctypes.byref(at), ctypes.c_void_p) for at in memory))
    launched = (function, SHARES, 1, 1, compiled.threads, 1, 1, compiled.shared_bytes)
    assert hip.hipModuleLaunchKernel(*launched, None, parameters, None) == 0
    total = np.zeros(SIZE, np.float32)
    out = total.ctypes.data_as(ctypes.c_void_p)
    assert hip.hipMemcpy(out, memory[3], ctypes.c_size_t(total.nbytes), 4) == 0
    for at in memory:
        hip.hipFree(at)
    hip.hipModuleUnload(module)
    return total, {finding.kind for finding in gpus.control.report().findings}


@pytest.mark.emulated
@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx1100"])
def test_the_last_workgroup_reads_what_all_have_released(chip: str, emulated_gpus: EmulatedGpus) -> None:
    total, found = run_emulated(KERNEL, chip, emulated_gpus)
    np.testing.assert_array_equal(total, SHARES)
    assert not found


@pytest.mark.emulated
@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx1100"])
def test_a_count_that_overtakes_stores_is_found_on_cdna(chip: str, emulated_gpus: EmulatedGpus) -> None:
    kernel = replace(KERNEL, name="overtaken_sums", function=overtaken_sums)
    _, found = run_emulated(kernel, chip, emulated_gpus)
    emulated_gpus.control.clear_report()
    assert found == ({"unordered"} if chip.startswith("gfx9") else set())
