"""A small VMFB with the ABI of a compiled model: a parameter, fences, a cache mutated in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import iree.compiler as compiler
import numpy as np
import pytest
from iree.runtime import ParameterIndex

from emulated_gpu.control import Control
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from tests.hip import EmulatedGpus
from tests.runtimes import RUNTIMES, needs_shortfin

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

  func.func @slow(%x: tensor<SIDExSIDExf32>) -> (tensor<SIDExSIDExf32>, tensor<SIDExSIDExf32>) {
    %zero = arith.constant 0.0 : f32
    %empty = tensor.empty() : tensor<SIDExSIDExf32>
    %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<SIDExSIDExf32>) -> tensor<SIDExSIDExf32>
    %a = linalg.matmul ins(%x, %x : tensor<SIDExSIDExf32>, tensor<SIDExSIDExf32>)
        outs(%init : tensor<SIDExSIDExf32>) -> tensor<SIDExSIDExf32>
    %b = arith.addf %a, %x : tensor<SIDExSIDExf32>
    return %a, %b : tensor<SIDExSIDExf32>, tensor<SIDExSIDExf32>
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
# `f` computes in memory of its caller's: 2 KiB between its two matmuls.
OWNED = """
module @m {
  util.func public @f$async(
      %x_: !hal.buffer_view, %y_: !hal.buffer_view, %workspace_: !hal.buffer_view,
      %wait: !hal.fence, %signal: !hal.fence
  ) attributes {
    inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub,
    iree.reflection = {
      shortfin_llm.caller_owned = "true",
      iree.abi.declaration = "async func @f(%input0: tensor<8x64xf32>) -> (%output0: tensor<8x64xf32>)"
    }
  } {
    %x = hal.tensor.import wait(%wait) => %x_ "x" : !hal.buffer_view -> tensor<8x64xf32>
    %halves = arith.constant dense<0.5> : tensor<64x64xf32>
    %zero = arith.constant 0.0 : f32
    %empty = tensor.empty() : tensor<8x64xf32>
    %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<8x64xf32>) -> tensor<8x64xf32>
    %a = linalg.matmul ins(%x, %halves : tensor<8x64xf32>, tensor<64x64xf32>) outs(%zeros : tensor<8x64xf32>)
      -> tensor<8x64xf32>
    %b = linalg.matmul ins(%a, %halves : tensor<8x64xf32>, tensor<64x64xf32>) outs(%zeros : tensor<8x64xf32>)
      -> tensor<8x64xf32>
    %y = hal.tensor.alias wait(%wait) => %b : tensor<8x64xf32> to %y_ : !hal.buffer_view
    %workspace = hal.buffer_view.buffer<%workspace_ : !hal.buffer_view> : !hal.buffer
    %done = hal.tensor.transients %y : tensor<8x64xf32> from %workspace : !hal.buffer
    %ready = hal.tensor.barrier join(%done : tensor<8x64xf32>) => %signal : !hal.fence
    util.return
  }
}
"""
WEIGHT = np.arange(8, dtype=np.float32)
_CPU = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
CHIP = "gfx942"
ASYNC = "--iree-execution-model=async-external"


def compile_vmfb(source: str, path: Path, *flags: str) -> Path:
    return _compile(source, path, *_CPU, *flags)


def compile_for_hip(source: str, path: Path, *flags: str, chip: str = CHIP, num_devices: int = 1) -> Path:
    """A VMFB whose devices are `@__device_0` and so on."""
    devices = [f"--iree-hal-target-device=hip[{index}]" for index in range(num_devices)]
    return _compile(source, path, *devices, resolve_target(f"hip:{chip}").flags[-1], *flags)


def _compile(source: str, path: Path, *flags: str) -> Path:
    compiler.compile_str(source, output_file=str(path), extra_args=list(flags))
    return path


def write_irpa(path: Path, **tensors: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Path:
    index = ParameterIndex()
    for name, tensor in tensors.items():
        index.add_buffer(name, tensor)
    index.create_archive_file(str(path))
    return path


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with fenced.vmfb and owned.vmfb (module `m`), unfenced.vmfb (module `plain`) and
    model.irpa.
    """
    directory = tmp_path_factory.mktemp("vmfb")
    # Not a power of two, at which the elements of a column share the few places that a cache has for them.
    compile_vmfb(FENCED.replace("SIDE", "800"), directory / "fenced.vmfb", ASYNC)
    compile_vmfb(UNFENCED, directory / "unfenced.vmfb")
    compile_vmfb(OWNED, directory / "owned.vmfb", ASYNC)
    write_irpa(directory / "model.irpa", weight=WEIGHT)
    return directory


@pytest.fixture(scope="session")
def control(emulated_gpus: EmulatedGpus) -> Control:
    """Of the emulated GPUs, which are of `CHIP`."""
    emulated_gpus.set_chip(CHIP)
    return emulated_gpus.control


@pytest.fixture(scope="session")
def hip_artefacts(control: Control, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `artefacts`, for the emulated GPU; `slow` is smaller there."""
    directory = tmp_path_factory.mktemp("hip_vmfb")
    compile_for_hip(FENCED.replace("SIDE", "64"), directory / "fenced.vmfb", ASYNC)
    compile_for_hip(UNFENCED, directory / "unfenced.vmfb")
    compile_for_hip(OWNED, directory / "owned.vmfb", ASYNC)
    write_irpa(directory / "model.irpa", weight=WEIGHT)
    return directory


@pytest.fixture(
    scope="session",
    params=[
        *RUNTIMES,
        pytest.param("hip-iree", marks=pytest.mark.emulated),
        pytest.param("hip-shortfin", marks=[needs_shortfin, pytest.mark.emulated]),
    ],
)
def runtime_under_test(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture(scope="session")
def device(open_another: Callable[[], Device]) -> Iterator[Device]:
    device = open_another()
    yield device
    device.close()


@pytest.fixture
def fallible_device(open_another: Callable[[], Device]) -> Iterator[Device]:
    """A device for the test alone, as a failed invocation leaves its traces on a device."""
    device = open_another()
    yield device
    device.close()


@pytest.fixture(scope="session")
def open_another(runtime_under_test: str, request: pytest.FixtureRequest) -> Callable[[], Device]:
    """Opens a device of the runtime under test."""
    device, _, runtime = runtime_under_test.rpartition("-")
    if device:
        request.getfixturevalue("control")
    return lambda: open_device(device or "cpu", cast(Runtime, runtime))


@pytest.fixture(scope="session")
def folder(runtime_under_test: str, request: pytest.FixtureRequest) -> Path:
    """`artefacts` or `hip_artefacts`, as the device under test needs."""
    name = "hip_artefacts" if runtime_under_test.startswith("hip-") else "artefacts"
    return cast(Path, request.getfixturevalue(name))


@pytest.fixture(scope="session")
def program(device: Device, folder: Path) -> Program:
    return device.load_program(folder / "fenced.vmfb", [folder / "model.irpa"], "m")


@pytest.fixture
def fallible_program(fallible_device: Device, folder: Path) -> Program:
    return fallible_device.load_program(folder / "fenced.vmfb", [folder / "model.irpa"], "m")
