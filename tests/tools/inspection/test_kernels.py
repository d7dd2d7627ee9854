"""Facts about kernels, against code assembled by hand and against LLVM's disassembly."""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from emulated_gpu.machine_code.code_object import Descriptor, Kernel, read_code_object
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.inspection.kernels import (
    KernelFacts,
    Remark,
    facts_of,
    load_bytes,
    read_kernels,
    remarks,
)
from tests.code_objects import disassembled, tiny_code_objects
from tests.conftest import BuildTiny

CHIPS = ("gfx942", "gfx1100")

# As in the CDNA 3 ISA manual: FLAT has 0b110111 above the operation (bits 18 to 24) and segment 2 (global) in
# bits 14 and 15; VOP3P-MAI has 0b110100111 above the operation (bits 16 to 22).
GLOBAL_LOAD_DWORDX4 = (0xDC000000 | 23 << 18 | 2 << 14, 0x007F0000)
GLOBAL_LOAD_USHORT = (0xDC000000 | 18 << 18 | 2 << 14, 0x007F0000)
GLOBAL_STORE_DWORD = (0xDC000000 | 28 << 18 | 2 << 14, 0x007F0000)
MFMA_F32_16X16X16_BF16 = (0xD3800000 | 0x61 << 16, 0x04020100)
S_ENDPGM = (0xBF810000,)


def assembled(*instructions: tuple[int, ...]) -> Kernel:
    words = [word for instruction in instructions for word in instruction]
    return Kernel(
        name="decode_bs1$async_dispatch_7_matmul_1x64x64_bf16xbf16xf32_dispatch_tensor_store",
        descriptor=Descriptor(640, 32, 8, 0, 0, 0, 0, 0, 0),
        arguments=(),
        lanes=64,
        num_vgprs=20,
        num_agprs=4,
        num_sgprs=10,
        num_vgpr_spills=3,
        num_sgpr_spills=5,
        max_workgroup=128,
        workgroup=(128, 1, 1),
        entry=0x1000,
        code=struct.pack(f"<{len(words)}I", *words),
    )


def test_counts_instructions_by_what_they_do() -> None:
    loads = [GLOBAL_LOAD_DWORDX4, GLOBAL_LOAD_USHORT, GLOBAL_LOAD_USHORT]
    kernel = assembled(*loads, MFMA_F32_16X16X16_BF16, MFMA_F32_16X16X16_BF16, GLOBAL_STORE_DWORD, S_ENDPGM)
    facts = facts_of(kernel, "gfx942")
    assert facts.num_instructions == 7
    assert facts.num_matrix_instructions == 2
    assert facts.loads == ((2, 2), (16, 1))
    assert (facts.widest_load, facts.commonest_load) == (16, 2)
    assert (facts.lds_bytes, facts.scratch_bytes) == (640, 32)
    assert (facts.num_vgprs, facts.num_agprs, facts.num_sgprs) == (20, 4, 10)
    assert (facts.num_vgpr_spills, facts.num_sgpr_spills) == (3, 5)
    assert facts.waves == 8
    assert facts.operation == "matmul_1x64x64_bf16xbf16xf32"


def test_a_kernel_without_loads_has_no_widest() -> None:
    kernel = assembled(S_ENDPGM)
    facts = facts_of(kernel, "gfx942")
    assert (facts.loads, facts.widest_load, facts.commonest_load) == ((), None, None)


@pytest.mark.parametrize(
    ("mnemonic", "width"),
    [
        ("global_load_dwordx4", 16),
        ("global_load_dwordx3", 12),
        ("buffer_load_dword", 4),
        ("global_load_ushort", 2),
        ("global_load_short_d16_hi", 2),
        ("flat_load_sbyte", 1),
        ("global_load_lds_dwordx4", 16),
        ("buffer_load_b128", 16),
        ("global_load_b96", 12),
        ("global_load_u16", 2),
        ("global_load_d16_hi_b16", 2),
        ("global_load_i8", 1),
        ("global_load_d16_u8", 1),
        ("global_store_dwordx4", None),
        ("s_load_dwordx8", None),
        ("ds_load_b128", None),
        ("scratch_load_b32", None),
    ],
)
def test_width_of_loads(mnemonic: str, width: int | None) -> None:
    assert load_bytes(mnemonic) == width


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_agrees_with_the_disassembly(build_tiny: BuildTiny, chip: str, tmp_path: Path) -> None:
    facts = {kernel.name: kernel for kernel in kernels_of(build_tiny, chip)}
    num_compared = 0
    for image in tiny_code_objects(build_tiny, chip):
        lines = disassembled(image, tmp_path)
        for kernel in read_code_object(image).kernels:
            end = kernel.entry + len(kernel.code)
            own = [line for address, line in lines.items() if kernel.entry <= address < end]
            if 4 * sum(line.words for line in own) < len(kernel.code):
                continue  # LLVM does not know all of it
            names = [line.mnemonic for line in own]
            found = facts[kernel.name]
            assert found.num_instructions == len(names)
            assert found.num_matrix_instructions == sum("mfma" in name or "wmma" in name for name in names)
            assert dict(found.loads) == Counter(filter(None, map(width_in_disassembly, names)))
            num_compared += 1
    assert num_compared > 2


def width_in_disassembly(name: str) -> int | None:
    """The bytes of a global load, by another reading of the name than the tested one."""
    if not re.match(r"(global|flat|buffer)_load", name):
        return None
    widths = {
        "dwordx4": 16,
        "b128": 16,
        "dwordx3": 12,
        "b96": 12,
        "dwordx2": 8,
        "b64": 8,
        "dword": 4,
        "b32": 4,
    }
    widths |= {"short": 2, "16": 2, "byte": 1, "u8": 1, "i8": 1, "b8": 1}
    plain = name.removesuffix("_hi").removesuffix("_d16")
    return next(width for suffix, width in widths.items() if plain.endswith(suffix))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_metadata_is_that_of_the_code_object(build_tiny: BuildTiny, chip: str) -> None:
    images = tiny_code_objects(build_tiny, chip)
    read = {kernel.name: kernel for image in images for kernel in read_code_object(image).kernels}
    kernels = kernels_of(build_tiny, chip)
    assert [kernel.name for kernel in kernels] == list(read)
    for kernel in kernels:
        assert kernel.num_vgprs == read[kernel.name].num_vgprs
        assert kernel.workgroup == read[kernel.name].workgroup
        assert kernel.lds_bytes == read[kernel.name].descriptor.lds_bytes
    assert any(kernel.num_matrix_instructions for kernel in kernels)


def test_a_program_for_a_cpu_has_no_kernels(build_tiny: BuildTiny) -> None:
    assert read_kernels(build_tiny(BuildOptions()).vmfb) is None


def kernels_of(build_tiny: BuildTiny, chip: str) -> tuple[KernelFacts, ...]:
    code = read_kernels(build_tiny(BuildOptions(device=f"hip:{chip}")).vmfb)
    assert code is not None
    assert code.chip == chip
    return code.kernels


PLAIN = KernelFacts(
    name="decode_bs4$async_dispatch_3_matmul_4x64x64_bf16xbf16xf32",
    workgroup=(64, 1, 1),
    lanes=64,
    num_vgprs=40,
    num_agprs=0,
    num_sgprs=20,
    num_vgpr_spills=0,
    num_sgpr_spills=0,
    lds_bytes=0,
    scratch_bytes=0,
    waves=8.0,
    num_instructions=100,
    num_matrix_instructions=4,
    loads=((2, 3), (16, 3)),
)


def named(operation: str) -> KernelFacts:
    return replace(PLAIN, name=f"extend$async_dispatch_3_{operation}", num_matrix_instructions=0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (PLAIN, ()),
        (replace(PLAIN, num_vgpr_spills=1), (Remark.SPILLS,)),
        (replace(PLAIN, num_sgpr_spills=1), (Remark.SPILLS,)),
        (replace(PLAIN, scratch_bytes=4), (Remark.SCRATCH,)),
        (replace(PLAIN, loads=((2, 4), (16, 3))), (Remark.NARROW,)),
        (replace(PLAIN, loads=((1, 4),)), (Remark.NARROW,)),
        (replace(PLAIN, loads=((4, 4), (16, 3))), ()),
        (replace(PLAIN, loads=()), ()),
        (replace(PLAIN, workgroup=(1, 1, 1)), (Remark.ONE_LANE,)),
        (replace(PLAIN, workgroup=None), ()),
        (named("matmul_4x64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_16x64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_Dx64x64_bf16xbf16xf32"), (Remark.NO_MATRIX,)),
        (named("matmul_1x64x64_bf16xbf16xf32"), ()),
        (named("attention_4xDx2x16xbf16"), (Remark.NO_MATRIX,)),
        (named("reduction_4x64_f32"), ()),
        (named("elementwise_4_i64"), ()),
        (
            replace(PLAIN, scratch_bytes=4, num_vgpr_spills=1, workgroup=(1, 1, 1)),
            (Remark.SPILLS, Remark.SCRATCH, Remark.ONE_LANE),
        ),
    ],
)
def test_remarks(kernel: KernelFacts, expected: tuple[Remark, ...]) -> None:
    assert remarks(kernel) == expected


def test_each_remark_has_a_meaning() -> None:
    assert len({remark.meaning for remark in Remark}) == len(Remark)
