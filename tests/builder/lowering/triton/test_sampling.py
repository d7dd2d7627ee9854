"""The Kernels of sampling: AMD GPUs have registers for them."""

from __future__ import annotations

import re

import pytest

from emulated_gpu.machine_code.code_object import read_code_object
from tests.hip import CHIPS

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.lowering.triton.sampling import SamplingKernels


def test_edits_round_as_the_host_does_on_nvidia_gpus() -> None:
    """PTX that says how each result is rounded is not fused by the driver's compiler."""
    text = compile_kernel(SamplingKernels(272, 64).edit_tokens(), "nvptx", "sm_90").image.decode()
    assert not re.findall(r"\bfma|\b(?:add|sub|mul|div)\.(?:full\.|approx\.)?f32", text)
    assert "div.rn.f32" in text
    assert "mul.rn.f32" in text


@pytest.mark.slow
@pytest.mark.parametrize("size", [272, 128256])
@pytest.mark.parametrize("chip", [*CHIPS, "gfx950", "gfx1201"])
def test_no_registers_are_spilled(chip: str, size: int) -> None:
    kernels = SamplingKernels(size, 64)
    for kernel in (
        *(kernels.weigh_parts(), kernels.draw(advances=False), kernels.draw(advances=True)),
        *(kernels.adjust_rows(), kernels.edit_tokens(), kernels.sum_parts(), kernels.write_terms()),
    ):
        for compiled in read_code_object(compile_kernel(kernel, "amdgpu", chip).image).kernels:
            assert (compiled.num_vgpr_spills, compiled.num_sgpr_spills) == (0, 0), kernel.name
