"""The table of chips, against the compiler's code objects and the emulated GPUs."""

from __future__ import annotations

from pathlib import Path

import iree.compiler.tools
import pytest

from emulated_gpu.chips import CHIPS as EMULATED
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS, WITHOUT_COMPILER, nearest
from shortfin_apps.llm.contract.gpu_code.code_object import chip_of, code_objects_in

PROGRAM = """
func.func @square(%x: tensor<64xf32>) -> tensor<64xf32> {
  %y = arith.mulf %x, %x : tensor<64xf32>
  return %y : tensor<64xf32>
}
"""


@pytest.mark.parametrize("chip", CHIPS)
def test_the_compiler_makes_code_objects_of_the_chips_number(chip: str) -> None:
    flags = list(resolve_target(f"hip:{chip}").flags)
    vmfb = iree.compiler.tools.compile_str(PROGRAM, extra_args=flags)
    assert {chip_of(image) for image in code_objects_in(vmfb)} == {chip}


@pytest.mark.parametrize("chip", WITHOUT_COMPILER)
def test_the_compiler_does_not_know_the_others(chip: str) -> None:
    flags = [flag.replace("gfx942", chip) for flag in resolve_target("hip:gfx942").flags]
    with pytest.raises(iree.compiler.tools.CompilerToolError):
        iree.compiler.tools.compile_str(PROGRAM, extra_args=flags)


@pytest.mark.parametrize("chip", EMULATED)
def test_emulated_chips_are_like_the_tables(chip: str) -> None:
    emulated, known = EMULATED[chip], CHIPS[chip]
    assert (emulated.number, emulated.lanes) == (known.number, known.lanes)
    assert emulated.lds_bytes == known.resources.lds_bytes


def test_the_emulated_device_has_the_resources_of_the_table() -> None:
    text = (Path(__file__).parents[3] / "emulated_gpu/emulated_gpu/hip/devices.c").read_text()
    rows = [line.strip(" {},").split(", ") for line in text.splitlines() if line.startswith('  {"gfx')]
    assert [row[0].strip('"') for row in rows] == list(EMULATED)
    for name, *row in rows:
        resources = CHIPS[name.strip('"')].resources
        assert [int(each) for each in row[-3:]] == [resources.waves, resources.vgprs, resources.vgpr_granule]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gfx1155", "do you mean hip:gfx1150?"),
        ("gfx1202", "do you mean hip:gfx1200?"),
        ("gfx1030", "chip 'gfx1030'. The chips to build for are gfx90a, "),
        ("7900xtx", "`rocminfo` on the machine with the GPU"),
        ("gfx1102", "IREE's compiler does not know gfx1102 yet"),
    ],
)
def test_an_unknown_chip_is_refused(name: str, hint: str) -> None:
    with pytest.raises(BuildError) as refused:
        resolve_target(f"hip:{name}")
    assert hint in str(refused.value)


def test_the_nearest_chip_is_of_the_same_generation() -> None:
    assert [nearest(name) for name in ("gfx941", "gfx1104", "gfx1153", "sm_90", "")] == [
        *("gfx942", "gfx1100", "gfx1150", None, None)
    ]
