"""Kernels compiled ahead of time, beside IREE's own in one program, on emulated GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.executable import executable
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.target import resolve_target
from tests.hip import CHIPS, EmulatedGpus
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.ahead_of_time.row_sums import row_sums
from tests.compiled_programs import compile_program

COLUMNS = 96
KERNEL = Kernel(
    name="row_sums",
    function=row_sums,
    interface=Interface(
        constants=("rows",),
        reads={"x": buffer("f32", "rows", COLUMNS)},
        writes={"sums": buffer("f32", "rows")},
    ),
    constexprs={"COLUMNS": COLUMNS, "BLOCK": 128, "ROWS": 4},
    grid=[Tiles("rows", 4)],
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
    %ready:2 = hal.tensor.barrier
      join(%negative, %alias : tensor<?xf32>, tensor<?xf32>) => %signal : !hal.fence
    %out = hal.tensor.export %ready#0 : tensor<?xf32>{%rows} -> !hal.buffer_view
    util.return %out : !hal.buffer_view
  }
}
"""


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_runs_between_those_of_iree(chip: str, emulated_gpus: EmulatedGpus, tmp_path: Path) -> None:
    text = executable(KERNEL, compile_kernel(KERNEL, "amdgpu", chip), "amdgpu")
    vmfb = compile_program(PROGRAM.replace("EXECUTABLE", text), resolve_target(f"hip:{chip}"))
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


def test_a_grid_counts_tiles_and_what_is_added_to_them() -> None:
    kernel = replace(KERNEL, grid=[Tiles("tokens", 16, more="rows"), 3, Tiles("splits")])
    text = executable(kernel, CodeObject(b"\x7f", 64), "amdgpu")
    assert kernel.workload == ("tokens", "rows", "splits")
    assert "^bb0(%device: !hal.device, %w0: index, %w1: index, %w2: index):" in text
    assert "%x.tiles = arith.ceildivui %w0, %x.tiles.by : index" in text
    assert "%x = arith.addi %x.tiles, %w1 : index" in text
    assert "%y = arith.constant 3 : index" in text
    assert "%z = arith.ceildivui %w2, %z.tiles.by : index" in text
    assert 'dense<"0x7F"> : vector<1xi8>' in text


def test_a_grid_can_multiply_tiles_and_have_a_limit() -> None:
    kernel = replace(KERNEL, grid=[Tiles("tokens", 128, times=32, most=132)])
    lines = executable(kernel, CodeObject(b"\x7f", 64), "nvptx").splitlines()
    assert [line.strip() for line in lines if "%x" in line and "return" not in line] == [
        "%x.tiles.by = arith.constant 128 : index",
        "%x.tiles = arith.ceildivui %w0, %x.tiles.by : index",
        "%x.all.by = arith.constant 32 : index",
        "%x.all = arith.muli %x.tiles, %x.all.by : index",
        "%x.count.by = arith.constant 132 : index",
        "%x = arith.minui %x.all, %x.count.by : index",
    ]
