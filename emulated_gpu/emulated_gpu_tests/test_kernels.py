"""IREE's kernels on every emulated chip, through `iree.runtime`, against numpy in f64."""

from __future__ import annotations

import hashlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import iree.compiler.tools
import iree.runtime
import ml_dtypes
import numpy as np
import pytest

from emulated_gpu.chips import CHIPS
from emulated_gpu.control import Control
from emulated_gpu.library import cache_folder

SOURCE = Path(__file__).with_name("kernels.mlir")
MATMUL = """
func.func @{name}(%a: tensor<{m}x{k}x{type}>, %b: tensor<{k}x{n}x{type}>) -> tensor<{m}x{n}x{sum}> {{
  %zero = arith.constant {zero} : {sum}
  %empty = tensor.empty() : tensor<{m}x{n}x{sum}>
  %filled = linalg.fill ins(%zero : {sum}) outs(%empty : tensor<{m}x{n}x{sum}>) -> tensor<{m}x{n}x{sum}>
  %product = linalg.matmul ins(%a, %b : tensor<{m}x{k}x{type}>, tensor<{k}x{n}x{type}>)
    outs(%filled : tensor<{m}x{n}x{sum}>) -> tensor<{m}x{n}x{sum}>
  return %product : tensor<{m}x{n}x{sum}>
}}
"""
SHAPES = [(128, 96, 64), (64, 64, 256), (33, 65, 47), (1, 80, 192)]  # m, n, k
MATMULS = [(type_, shape) for type_ in ("f32", "f16", "bf16", "i8", "fp8") for shape in SHAPES]
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8}
# gfx1100 has no operations on 8-bit floats; gfx942's have another bias and no infinity.
FP8 = {
    "gfx942": ("f8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
    "gfx950": ("f8E4M3FN", ml_dtypes.float8_e4m3fn),
    **dict.fromkeys(("gfx1200", "gfx1201"), ("f8E4M3FN", ml_dtypes.float8_e4m3fn)),
}
# IREE 3.9 crashes in compiling matmuls for these.
CRASHES = ("gfx1103", "gfx1150", "gfx1151")
# Largest error from the rounding of sums, relative to the sum of absolute values.
ROUNDING = {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-6, "fp8": 1e-6, "i8": 0}


def source_of(chip: str) -> str:
    return SOURCE.read_text() + "".join(
        MATMUL.format(
            name=matmul_name(type_, shape),
            type=FP8[chip][0] if type_ == "fp8" else type_,
            sum="i32" if type_ == "i8" else "f32",
            zero="0" if type_ == "i8" else "0.0",
            **dict(zip("mnk", shape, strict=True)),
        )
        for type_, shape in MATMULS
        if type_ != "fp8" or chip in FP8
    )


def matmul_name(type_: str, shape: Sequence[int]) -> str:
    return f"matmul_{type_}_" + "x".join(map(str, shape))


def compiled(chip: str) -> Path:
    """The kernels for a chip, from the cache if they are there."""
    source = source_of(chip)
    version = importlib.metadata.version("iree-base-compiler")
    key = hashlib.sha256(f"{version} {chip} {source}".encode()).hexdigest()[:24]
    path = cache_folder() / "kernels" / f"{key}.vmfb"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / "kernels.vmfb"
            flags = ["--iree-hal-target-device=hip", f"--iree-hip-target={chip}"]
            iree.compiler.tools.compile_str(source, output_file=str(output), extra_args=flags)
            output.replace(path)
    return path


@dataclass(frozen=True)
class Kernels:
    """The kernels on a chip."""

    chip: str
    module: Any
    control: Control

    def run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        results = self.module[name](*inputs)
        return [each.to_host() for each in (results if isinstance(results, Sequence) else [results])]


@cache
def _loaded(chip: str) -> Any:
    """A device of the chip that the control has been told to be, with the kernels."""
    config = iree.runtime.Config(device=iree.runtime.get_driver("hip").create_default_device())
    return iree.runtime.load_vm_module(
        iree.runtime.VmModule.mmap(config.vm_instance, str(compiled(chip))), config
    )


@pytest.fixture(params=[chip for chip in CHIPS if chip not in CRASHES])
def kernels(request: pytest.FixtureRequest, fresh: Control) -> Iterator[Kernels]:
    """On each chip; nothing may be found to be wrong with them."""
    fresh.command(f"chip {request.param}")
    yield Kernels(request.param, _loaded(request.param), fresh)
    report = fresh.report()
    assert report.findings == ()
    assert report.misuses == ()


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


@pytest.mark.parametrize("size", [1, 255, 256, 1003])
def test_silu(kernels: Kernels, size: int) -> None:
    x, y = rng_of("silu").standard_normal((2, size)).astype(np.float32) * 4
    (result,) = kernels.run("silu_f32", x, y)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(result, wide / (1 + np.exp(-wide)) * y, rtol=2e-6)


def test_functions_of_f32(kernels: Kernels) -> None:
    x = rng_of("functions").standard_normal(301).astype(np.float32) * 3
    results = kernels.run("functions_f32", x)
    wide = x.astype(np.float64)
    expected = (1 / np.sqrt(np.abs(wide)), np.sin(wide), np.tanh(wide), np.log(np.abs(wide)))
    for result, each in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_multiply_and_add_of_16_bits(kernels: Kernels, type_: str) -> None:
    x, y = rng_of(type_).standard_normal((2, 517)).astype(DTYPES[type_])
    (bits,) = kernels.run(f"fma_{type_}", x, y)
    result = bits.view(DTYPES[type_])
    one_ulp = {"f16": 2.0**-10, "bf16": 2.0**-7}[type_]
    expected = x.astype(np.float64) * y.astype(np.float64) + x.astype(np.float64)
    magnitude = np.abs(x.astype(np.float64) * y.astype(np.float64)) + np.abs(x.astype(np.float64))
    assert (np.abs(result.astype(np.float64) - expected) <= one_ulp * magnitude).all()


def test_integers(kernels: Kernels) -> None:
    rng = rng_of("integers")
    x, y = rng.integers(-(2**31), 2**31, (2, 517)).astype(np.int32)
    y[::3] = rng.integers(1, 100, y[::3].size)
    x[0], y[0] = -(2**31), 1
    quotient, mixed, product = kernels.run("integers", x, y)
    expected = (np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64)) * np.sign(x) * np.sign(y)).astype(
        np.int32
    )
    np.testing.assert_array_equal(quotient, expected)
    np.testing.assert_array_equal(mixed, np.minimum(x, y) ^ expected)
    np.testing.assert_array_equal(product, x.astype(np.int64) * y)


@pytest.mark.parametrize("size", [1, 64, 259])
def test_sums_of_f32(kernels: Kernels, size: int) -> None:
    x = rng_of("sums").standard_normal((37, size)).astype(np.float32)
    (result,) = kernels.run("sums_f32", x)
    wide = x.astype(np.float64)
    assert (np.abs(result - wide.sum(1)) <= 2e-6 * np.abs(wide).sum(1)).all()


def test_maxima_of_f16(kernels: Kernels) -> None:
    x = rng_of("maxima").standard_normal((19, 515)).astype(np.float16)
    x[3] = -np.inf  # NaN is left out: IREE 3.9 reduces by llvm.maxnum, which passes it over
    np.testing.assert_array_equal(kernels.run("maxima_f16", x)[0], x.max(1))


def test_sums_of_i8(kernels: Kernels) -> None:
    x = rng_of("sums_i8").integers(-128, 128, (23, 1029)).astype(np.int8)
    np.testing.assert_array_equal(kernels.run("sums_i8", x)[0], x.sum(1, dtype=np.int32))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


@pytest.mark.parametrize(("name", "shape", "tolerance"), [("f32", (13, 777), 2e-6), ("f16", (5, 64), 4e-3)])
def test_softmax(kernels: Kernels, name: str, shape: tuple[int, int], tolerance: float) -> None:
    x = (rng_of("softmax").standard_normal(shape) * 3).astype(DTYPES[name])
    x[1, 5:] = -np.inf
    (result,) = kernels.run(f"softmax_{name}", x)
    np.testing.assert_allclose(
        result, softmax(x.astype(np.float64)), rtol=tolerance, atol=1e-6 if name == "f16" else 0
    )


@pytest.mark.parametrize(("type_", "shape"), MATMULS)
def test_matmul(kernels: Kernels, type_: str, shape: tuple[int, int, int]) -> None:
    if type_ == "fp8" and kernels.chip not in FP8:
        pytest.skip(f"{kernels.chip} has no operations on 8-bit floats")
    m, n, k = shape
    rng = rng_of(matmul_name(type_, shape))
    dtype = FP8[kernels.chip][1] if type_ == "fp8" else DTYPES[type_]
    draw: Callable[[tuple[int, int]], np.ndarray] = rng.standard_normal
    if type_ == "i8":
        a, b = (rng.integers(-128, 128, size).astype(np.int8) for size in ((m, k), (k, n)))
    else:
        a, b = (draw(size).astype(dtype) for size in ((m, k), (k, n)))
    (result,) = kernels.run(matmul_name(type_, shape), a, b)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if kernels.chip == "gfx90a" and type_ == "f16":  # its matrix operations take denormals for zeros
        for each in (wide_a, wide_b):
            each[np.abs(each) < 2.0**-14] = 0
    error = np.abs(result - wide_a @ wide_b)
    assert (error <= ROUNDING[type_] * (np.abs(wide_a) @ np.abs(wide_b))).all()


def test_attention(kernels: Kernels) -> None:
    rng = rng_of("attention")
    q, k, v = (rng.standard_normal((3, rows, 64)).astype(np.float16) for rows in (128, 192, 192))
    (result,) = kernels.run("attention_f16", q, k, v)
    q64, k64, v64 = (each.astype(np.float64) for each in (q, k, v))
    expected = softmax(q64 @ k64.transpose(0, 2, 1) / 8) @ v64
    np.testing.assert_allclose(result, expected, atol=2e-3)  # probabilities are rounded to f16


@pytest.mark.parametrize("type_", ["f16", "bf16", "i8"])
def test_matmuls_use_matrix_operations(kernels: Kernels, type_: str) -> None:
    m, n, k = SHAPES[0]
    zeros = [np.zeros(size, DTYPES[type_]) for size in ((m, k), (k, n))]
    kernels.run(matmul_name(type_, SHAPES[0]), *zeros)
    counters = kernels.control.report().kernels.values()
    assert sum(each.matrix_operations for each in counters) >= m * n * k
