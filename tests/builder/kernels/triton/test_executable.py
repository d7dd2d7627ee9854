"""Kernels compiled ahead of time, beside IREE's own in one program, on emulated GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.compile import CodeObject, Tuning, compile_kernel
from shortfin_apps.llm.builder.kernels.triton.executable import Tiles, executable
from shortfin_apps.llm.builder.program.compiler import compile_text
from shortfin_apps.llm.builder.target import resolve_target
from tests.hip import CHIPS, EmulatedGpus
from tests.runtimes import needs_shortfin

triton = pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.triton import row_sums  # noqa: E402  needs Triton

COLUMNS = 96
INTERFACE = Interface(
    constants=("rows",),
    reads={"x": buffer("f32", "rows", COLUMNS)},
    writes={"sums": buffer("f32", "rows")},
)
# Twice the sums of x's rows are added to `totals` in place; IREE's kernels compute what is before and after.
PROGRAM = """
module @m {
EXECUTABLE
  util.func public @f$async(
      %x_: !hal.buffer_view, %totals_: !hal.buffer_view, %wait: !hal.fence, %signal: !hal.fence
  ) -> !hal.buffer_view attributes {
    inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub,
    iree.reflection = {"iree.abi.declaration" =
      "async func @f(%input0: tensor<?x96xf32>, %input1: tensor<?xf32>) -> (%output0: tensor<?xf32>)"}
  } {
    %rows = hal.buffer_view.dim<%x_ : !hal.buffer_view>[0] : index
    %n = arith.index_cast %rows : index to i32
    %x = hal.tensor.import wait(%wait) => %x_ : !hal.buffer_view -> tensor<?x96xf32>{%rows}
    %totals = hal.tensor.import wait(%wait) => consume %totals_ "t" : !hal.buffer_view -> tensor<?xf32>{%rows}
    %twice = arith.addf %x, %x : tensor<?x96xf32>
    %sums = flow.dispatch @row_sums::@row_sums[%rows](%n, %twice, %totals)
      : (i32, tensor<?x96xf32>{%rows}, tensor<?xf32>{%rows}) -> %totals{%rows}
    %alias = hal.tensor.alias wait(%wait) => %sums : tensor<?xf32>{%rows} to %totals_ : !hal.buffer_view
    %negative = arith.negf %alias : tensor<?xf32>
    %ready:2 = hal.tensor.barrier join(%negative, %alias : tensor<?xf32>, tensor<?xf32>) => %signal : !hal.fence
    %out = hal.tensor.export %ready#0 : tensor<?xf32>{%rows} -> !hal.buffer_view
    util.return %out : !hal.buffer_view
  }
}
"""


def compile_row_sums(chip: str) -> CodeObject:
    return compile_kernel(
        row_sums.row_sums,
        "row_sums",
        INTERFACE,
        {"COLUMNS": COLUMNS, "BLOCK": 128, "ROWS": 4},
        chip,
        Tuning(),
    )


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_runs_between_those_of_iree(chip: str, emulated_gpus: EmulatedGpus, tmp_path: Path) -> None:
    text = executable(compile_row_sums(chip), INTERFACE, 1, [Tiles(0, 4)])
    vmfb = tmp_path / "model.vmfb"
    compile_text(PROGRAM.replace("EXECUTABLE", text), resolve_target(f"hip:{chip}").flags, vmfb)
    device = emulated_gpus.open(chip)
    with emulated_gpus.watch(chip):
        program = device.load_program(vmfb, [], "m")
        for rows in (1, 3, 4, 37):
            x = np.random.default_rng(rows).standard_normal((rows, COLUMNS)).astype(np.float32)
            totals = device.allocate((rows,), np.dtype(np.float32))
            expected = np.zeros(rows, np.float32)
            for _ in range(2):
                (result,) = program.submit("f", [device.upload(x), totals]).wait()
                expected += 2 * x.sum(axis=1)
                np.testing.assert_allclose(device.download(result), -expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(device.download(totals), expected, rtol=1e-5, atol=1e-5)
    device.close()
