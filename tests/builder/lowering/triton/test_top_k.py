"""The Kernels of top-k: AMD GPUs have registers for them."""

from __future__ import annotations

import pytest

from emulated_gpu.machine_code.code_object import read_code_object
from tests.hip import CHIPS

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel
from shortfin_apps.llm.builder.lowering.triton.top_k import top_k_kernels


@pytest.mark.slow
@pytest.mark.parametrize("size", [272, 128256])
@pytest.mark.parametrize("chip", CHIPS)
def test_no_registers_are_spilled(chip: str, size: int) -> None:
    for kernel in top_k_kernels(size, 64, "amdgpu"):
        for compiled in read_code_object(compile_kernel(kernel, "amdgpu", chip).image).kernels:
            assert (compiled.num_vgpr_spills, compiled.num_sgpr_spills) == (0, 0), kernel.name
