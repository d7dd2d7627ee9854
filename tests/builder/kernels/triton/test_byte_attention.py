"""Attention over a cache in bytes for NVIDIA GPUs, compiled: no GPU and no emulation of one runs it here.

bench/attention_times.py compares its results with numpy's on a GPU. Compiling checks that bytes reach the
registers of matrix instructions without being moved: conversions between layouts are asserted to be trivial.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.byte_attention import byte_form
from tests.builder.kernels.triton.assembled import spilled_bytes
from tests.builder.lowering.triton.test_byte_attention import singles


@pytest.mark.parametrize("absent", ["sinks", "sinks offsets"])
@pytest.mark.parametrize("weights", ["bf16", "f16"])
def test_the_kernel_is_one_warp_that_keeps_all_in_registers(
    absent: str, weights: str, tmp_path: Path
) -> None:
    code = compile_kernel(byte_form(singles(absent, weights=weights), 64), "nvptx", "sm_90")
    text = code.image.decode()
    assert ".version 8.4" in text
    assert (code.threads, code.shared_bytes) == (32, 0)
    assert spilled_bytes(text, tmp_path) == {0}
    # Keys and values of two pages are 16 loads of 16 bytes per thread, before the loop and in it. Those of
    # queries have a predicate before them.
    assert len(re.findall(r"^\s*ld\.global\.v4\.b32", text, re.MULTILINE)) == 32
