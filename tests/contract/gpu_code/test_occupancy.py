"""Occupancy, against figures worked out by hand, and against what LLVM says of a kernel that it compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from emulated_gpu.machine_code.code_object import CodeObject, Descriptor, Kernel, read_code_object
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS as CHIPS_OF_AMD
from shortfin_apps.llm.contract.gpu_code.occupancy import waves_by_kernel, waves_per_simd
from tests.code_objects import CHIPS, tiny_code_objects
from tests.conftest import BuildTiny

WGP_MODE = 1 << 29
LANES = {name: chip.lanes for name, chip in CHIPS_OF_AMD.items() if name != "gfx950"}  # LLVM 19 lacks it
PROGRAM = """
@lds = internal addrspace(3) global [{lds} x i8] poison
define amdgpu_kernel void @kernel() "amdgpu-flat-work-group-size"="{workgroup},{workgroup}" {{
  call void asm sideeffect "", "~{{v{last}}}"()
  store volatile i8 1, ptr addrspace(3) @lds
  ret void
}}
"""


def kernel(*, vgprs: int = 1, lds: int = 0, lanes: int = 64, workgroup: int = 64, rsrc1: int = 0) -> Kernel:
    return Kernel(
        name="kernel",
        descriptor=Descriptor(lds, 0, 0, 0, 0, rsrc1, 0, 0, 0),
        arguments=(),
        lanes=lanes,
        num_vgprs=vgprs,
        num_agprs=0,
        num_sgprs=16,
        num_vgpr_spills=0,
        num_sgpr_spills=0,
        max_workgroup=1024,
        workgroup=(workgroup, 1, 1),
        entry=0,
        code=b"",
    )


@pytest.mark.parametrize(
    ("vgprs", "waves"),
    [(0, 8), (64, 8), (65, 7), (72, 7), (73, 6), (96, 5), (128, 4), (129, 3), (256, 2), (257, 1), (512, 1)],
)
def test_cdna_has_512_registers_in_granules_of_8(vgprs: int, waves: int) -> None:
    assert waves_per_simd(kernel(vgprs=vgprs), "gfx942") == waves
    assert waves_per_simd(kernel(vgprs=vgprs), "gfx950") == waves


@pytest.mark.parametrize(
    ("vgprs", "wave32", "wave64"),
    [
        (24, 16, 16),
        (96, 16, 8),
        (97, 12, 7),
        (120, 12, 6),
        (144, 10, 5),
        (168, 9, 4),
        (192, 8, 4),
        (256, 5, 2),
    ],
)
@pytest.mark.parametrize("chip", ["gfx1100", "gfx1201"])
def test_rdna_has_1536_registers_for_waves_of_32_lanes(
    vgprs: int, wave32: int, wave64: int, chip: str
) -> None:
    made = kernel(vgprs=vgprs, lanes=32, workgroup=32, rsrc1=WGP_MODE)
    assert waves_per_simd(made, chip) == wave32
    assert waves_per_simd(replace(made, lanes=64), chip) == wave64


@pytest.mark.parametrize(
    ("chip", "lds", "waves"),
    [
        ("gfx942", 16 << 10, 4),  # 4 workgroups of 4 waves on 4 SIMDs
        ("gfx942", (16 << 10) + 1, 3),
        ("gfx942", 64 << 10, 1),
        ("gfx950", 16 << 10, 8),  # 9 of its granules hold one, and 160 KiB would hold 9 workgroups
        ("gfx950", 64 << 10, 2),
        ("gfx950", 160 << 10, 1),
    ],
)
def test_lds_limits_the_workgroups_of_a_cu(chip: str, lds: int, waves: int) -> None:
    assert waves_per_simd(kernel(lds=lds, workgroup=256), chip) == waves


def test_a_wgp_shares_the_lds_of_two_cus() -> None:
    made = kernel(lds=64 << 10, lanes=32, workgroup=128)
    in_wgp = replace(made, descriptor=replace(made.descriptor, rsrc1=WGP_MODE))
    assert waves_per_simd(in_wgp, "gfx1100") == 2 * 4 / 4
    assert waves_per_simd(made, "gfx1100") == 1 * 4 / 2


@pytest.mark.parametrize(
    ("workgroup", "waves"),
    [(64, 8), (128, 8), (1024, 8), (448, 7)],  # 448: 4 workgroups of 7 waves leave 4 of 32 places free
)
def test_workgroups_fill_the_simds_as_a_whole(workgroup: int, waves: int) -> None:
    assert waves_per_simd(kernel(workgroup=workgroup), "gfx942") == waves


def test_workgroups_of_several_waves_need_barriers() -> None:
    """32 of a WGP, at 2 waves each on 4 SIMDs; single waves need none."""
    made = kernel(lanes=32, workgroup=64, rsrc1=WGP_MODE)
    assert waves_per_simd(made, "gfx1100") == 16
    assert waves_per_simd(replace(made, descriptor=replace(made.descriptor, rsrc1=0)), "gfx1100") == 16
    assert waves_per_simd(kernel(workgroup=128), "gfx942") == 8


def test_a_workgroup_of_any_size_counts_as_the_largest() -> None:
    assert waves_per_simd(replace(kernel(vgprs=72), workgroup=None), "gfx942") == 4


def test_of_kernels_of_one_name_the_fewest_waves_count() -> None:
    objects = [CodeObject("gfx942", (), (kernel(vgprs=vgprs),)) for vgprs in (128, 256, 64)]
    assert waves_by_kernel(objects) == {"kernel": 2}


@pytest.mark.parametrize("chip", LANES)
@pytest.mark.parametrize(
    ("vgprs", "lds"),
    [
        *((vgprs, 1) for vgprs in (8, 64, 65, 72, 73, 96, 97, 120, 121, 129, 144, 169, 192, 200, 256)),
        *((8, lds) for lds in (8 << 10, 16 << 10, 20_000, 32 << 10, 64 << 10)),
        (100, 16 << 10),
        (100, 40_000),
    ],
)
def test_llvm_finds_as_many_waves(chip: str, vgprs: int, lds: int) -> None:
    """With a wave of each workgroup on each of four SIMDs, as LLVM counts no fractions."""
    workgroup = 4 * LANES[chip]
    if (llc := shutil.which("llc-19")) is None:
        pytest.skip("needs LLVM 19: apt-get install llvm-19")
    text = PROGRAM.format(lds=lds, workgroup=workgroup, last=vgprs - 1)
    command = [llc, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={chip}", "-o", "-"]
    assembly = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^; Occupancy: (\d+)$", assembly, re.MULTILINE)
    made = kernel(vgprs=vgprs, lds=lds, lanes=LANES[chip], workgroup=workgroup, rsrc1=WGP_MODE)
    assert found == [f"{waves_per_simd(made, chip):g}"]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_compiled_kernels_fit_their_chip(build_tiny: BuildTiny, chip: str) -> None:
    objects = [read_code_object(image) for image in tiny_code_objects(build_tiny, chip)]
    waves = waves_by_kernel(objects)
    assert waves
    assert all(0 < each <= CHIPS_OF_AMD[chip].resources.waves for each in waves.values())
    kernels = [each for found in objects for each in found.kernels]
    if CHIPS_OF_AMD[chip].resources.has_wgp:  # what is assumed in reading the descriptor
        assert any(each.descriptor.rsrc1 & WGP_MODE for each in kernels)
