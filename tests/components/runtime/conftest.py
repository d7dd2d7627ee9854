"""A small VMFB with the ABI of a compiled model: a parameter, fences, a cache mutated in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import iree.compiler as compiler
import numpy as np
import pytest
from iree.runtime import ParameterIndex

from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from tests.runtimes import RUNTIMES

# `accumulate`: cache = 2 * cache + x, in place, so that the order of calls shows; returns it plus a weight.
FENCED = """
module @m {
  util.global private @weight = #flow.parameter.named<"model"::"weight"> : tensor<8xf32>

  util.func public @accumulate$async(
      %x_: !hal.buffer_view, %cache_: !hal.buffer_view, %wait: !hal.fence, %signal: !hal.fence
  ) -> !hal.buffer_view attributes {
    inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub,
    iree.reflection = {
      "shortfin_llm.only_dispatches" = "true",
      "iree.abi.declaration" =
        "async func @accumulate(%input0: tensor<8xf32>, %input1: tensor<8xf32>) -> (%output0: tensor<8xf32>)"
    }
  } {
    %x = hal.tensor.import wait(%wait) => %x_ "x" : !hal.buffer_view -> tensor<8xf32>
    %cache = hal.tensor.import wait(%wait) => consume %cache_ "cache" : !hal.buffer_view -> tensor<8xf32>
    %weight = util.global.load @weight : tensor<8xf32>
    %twice = arith.addf %cache, %cache : tensor<8xf32>
    %next = arith.addf %twice, %x : tensor<8xf32>
    %alias = hal.tensor.alias wait(%wait) => %next : tensor<8xf32> to %cache_ : !hal.buffer_view
    %sum = arith.addf %alias, %weight : tensor<8xf32>
    %ready:2 = hal.tensor.barrier join(%sum, %alias : tensor<8xf32>, tensor<8xf32>) => %signal : !hal.fence
    %out = hal.tensor.export %ready#0 : tensor<8xf32> -> !hal.buffer_view
    util.return %out : !hal.buffer_view
  }

  func.func @slow(%x: tensor<1024x1024xf32>) -> (tensor<1024x1024xf32>, tensor<1024x1024xf32>) {
    %zero = arith.constant 0.0 : f32
    %empty = tensor.empty() : tensor<1024x1024xf32>
    %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
    %a = linalg.matmul ins(%x, %x : tensor<1024x1024xf32>, tensor<1024x1024xf32>)
        outs(%init : tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
    %b = arith.addf %a, %x : tensor<1024x1024xf32>
    return %a, %b : tensor<1024x1024xf32>, tensor<1024x1024xf32>
  }
  func.func @refuse_negative(%x: tensor<1xi64>) -> tensor<1xi64> {
    %zero = arith.constant 0 : index
    %first = tensor.extract %x[%zero] : tensor<1xi64>
    %none = arith.constant 0 : i64
    %fine = arith.cmpi sge, %first, %none : i64
    cf.assert %fine, "negative"
    return %x : tensor<1xi64>
  }
  func.func @double_i64(%x: tensor<?x2xi64>) -> tensor<?x2xi64> {
    %y = arith.addi %x, %x : tensor<?x2xi64>
    return %y : tensor<?x2xi64>
  }
  func.func @double_i32(%x: tensor<?x2xi32>) -> tensor<?x2xi32> {
    %y = arith.addi %x, %x : tensor<?x2xi32>
    return %y : tensor<?x2xi32>
  }
  func.func @double_f32(%x: tensor<?x2xf32>) -> tensor<?x2xf32> {
    %y = arith.addf %x, %x : tensor<?x2xf32>
    return %y : tensor<?x2xf32>
  }
  func.func @double_f16(%x: tensor<?x2xf16>) -> tensor<?x2xf16> {
    %y = arith.addf %x, %x : tensor<?x2xf16>
    return %y : tensor<?x2xf16>
  }
  func.func @double_bf16(%x: tensor<?x2xbf16>) -> tensor<?x2xbf16> {
    %y = arith.addf %x, %x : tensor<?x2xbf16>
    return %y : tensor<?x2xbf16>
  }
}
"""
UNFENCED = """
module @plain {
  func.func @negate(%x: tensor<4xf32>) -> tensor<4xf32> {
    %y = arith.negf %x : tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
"""
WEIGHT = np.arange(8, dtype=np.float32)
_TARGET = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]


def compile_vmfb(source: str, path: Path, *flags: str) -> Path:
    arguments = [*_TARGET, "--iree-llvmcpu-target-cpu=host", *flags]
    compiler.compile_str(source, output_file=str(path), extra_args=arguments)
    return path


def write_irpa(path: Path, **tensors: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Path:
    index = ParameterIndex()
    for name, tensor in tensors.items():
        index.add_buffer(name, tensor)
    index.create_archive_file(str(path))
    return path


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with fenced.vmfb (module `m`), unfenced.vmfb (module `plain`) and model.irpa."""
    directory = tmp_path_factory.mktemp("vmfb")
    compile_vmfb(FENCED, directory / "fenced.vmfb", "--iree-execution-model=async-external")
    compile_vmfb(UNFENCED, directory / "unfenced.vmfb")
    write_irpa(directory / "model.irpa", weight=WEIGHT)
    return directory


@pytest.fixture(scope="session", params=RUNTIMES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device("cpu", cast(Runtime, request.param))
    yield device
    device.close()


@pytest.fixture(scope="session")
def program(device: Device, artefacts: Path) -> Program:
    return device.load_program(artefacts / "fenced.vmfb", [artefacts / "model.irpa"], "m")
