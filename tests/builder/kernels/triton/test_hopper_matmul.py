"""The matmuls for Hopper with loads by TMA, compiled: no GPU and no emulation of one runs them here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel_cache import KernelCache
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import Fp8Rows
from shortfin_apps.llm.contract.errors import BuildError

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.hopper_matmul import HopperTile, hopper_form, with_tile
from tests.builder.kernels.triton.assembled import spilled_bytes, text_with_loads_by_tma
from tests.builder.lowering.triton.test_hopper_matmul import gate_up, linear, qkv, qkv_in_bytes
from tests.matrices import slow_but

FP8 = Fp8Rows("f8E4M3FN")


CASES = {
    f"{make.__name__}-{'bf16' if layout is None else 'fp8'}-{tokens}": (make, layout, tokens)
    for make in (qkv, qkv_in_bytes, linear, gate_up)
    for layout, tokens in ((None, 256), (None, 512), (None, 2048), (FP8, 256), (FP8, 512))
}


@pytest.mark.parametrize("case", slow_but(["linear-fp8-512", "qkv_in_bytes-bf16-256"], CASES))
def test_the_kernel_assembles_as_ptx_8_4(case: str, tmp_path: Path) -> None:
    make, layout, tokens = CASES[case]
    text = text_with_loads_by_tma(hopper_form(make(tokens, layout), tokens), maps=2)
    assert spilled_bytes(text, tmp_path) == {0}


def test_a_scratch_must_have_room_for_every_workgroup() -> None:
    kernel = hopper_form(linear(512), 512)
    old = kernel.interface
    given = Interface(old.constants, old.reads, {**old.writes, "scratch": buffer("i8", 132 * 256)})
    with pytest.raises(BuildError, match="needs 256 bytes of `scratch` per workgroup"):
        compile_kernel(replace(kernel, interface=given), "nvptx", "sm_90")


def test_the_cache_tells_tiles_and_forms_apart(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, "sm_90")
    kernels = [linear(512), *(with_tile(linear(512), HopperTile(128, stages)) for stages in (5, 6))]
    assert len({cache._key(replace(kernel, name="same")) for kernel in kernels}) == 3
