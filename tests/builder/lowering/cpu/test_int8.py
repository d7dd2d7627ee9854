"""Matrices in 8-bit integers on vectors against numpy, over shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.matmul_int8 import FEW_ROWS
from shortfin_apps.llm.builder.lowering.cpu.int8 import Int8Operations
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_kernels import (
    CPUS,
    NO_TILES,
    ROWS,
    ConstantWeights,
    Inputs,
    Load,
    cpu_or_skip,
    function,
    load,
    narrow,
    widen,
)
from tests.builder.compiled_model import HOST, TINY
from tests.builder.specs import changed
from tests.matrices import slow_but

F32 = npt.NDArray[np.float32]

OPTIONS = BuildOptions(weights="int8")
# Neither 96 nor 112 is whole tiles of 64 along K; 48 and 224 leave half a panel.
SPEC = changed(TINY, {"hidden_size": 96, "features": 112, "vocab_size": 48})
FEW = [1, 5, FEW_ROWS]  # rows that are known when the kernel is made
SHAPES = {
    "blk.0.attn_norm.weight": (96,),
    "blk.0.attn_qkv.weight": (48, 96),
    "blk.0.attn_output.weight": (96, 1600),
    "blk.0.ffn_gate_up.weight": (224, 96),
    "blk.0.ffn_down.weight": (96, 112),
}


def make_weights() -> ConstantWeights:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return ConstantWeights(weights, {name: weight_layout(name, SPEC, OPTIONS, NO_TILES) for name in SHAPES})


@dataclass(frozen=True)
class Kernels:
    weights: ConstantWeights
    module: Any
    target: Target

    @classmethod
    def build(cls, target: Target, folder: Path, load: Load = load) -> Kernels:
        weights = make_weights()
        rendered = RenderedKernels()
        operations = Int8Operations(LoweringContext(SPEC, OPTIONS, target, weights, rendered))

        def plain(e: Emitter, x: Tensor) -> list[Tensor]:
            normed = operations.rms_norm(e, x, "blk.0.attn_norm.weight")
            return [operations.linear(e, normed, "blk.0.attn_qkv.weight")]

        def gated(e: Emitter, x: Tensor) -> list[Tensor]:
            normed = operations.rms_norm(e, x, "blk.0.attn_norm.weight")
            return [widen(e, operations.gated_linear(e, normed, "blk.0.ffn_gate_up.weight", "silu"))]

        def residual(weight: str) -> Callable[..., list[Tensor]]:
            return lambda e, h, r: [operations.linear(e, narrow(e, h, "bf16"), weight, r)]

        functions: list[str] = []
        suffixes: dict[str, int | str] = {"": "?"} | {f"_{few}": few for few in FEW}
        for name, rows in suffixes.items():
            x: Inputs = {"x": (rows, 96)}
            functions += [
                function(f"plain{name}", x, plain),
                function(f"gated{name}", x, gated),
                function(
                    f"down{name}", {"h": (rows, 112), "r": (rows, 96)}, residual("blk.0.ffn_down.weight")
                ),
                function(
                    f"output{name}",
                    {"h": (rows, 1600), "r": (rows, 96)},
                    residual("blk.0.attn_output.weight"),
                ),
            ]
        text = [*weights.declarations(), *rendered.texts.values(), *functions]
        return cls(weights, load("\n".join(["module @kernels {", *text, "}"]), folder), target)

    def outputs(self, inputs: dict[str, F32], rows: int, suffix: str = "") -> dict[str, F32]:
        """The results of each function for the first `rows` rows."""
        x, h, wide = (inputs[name][:rows] for name in ("x", "h", "wide"))
        arguments = {"plain": (x,), "gated": (x,), "down": (h, x), "output": (wide, x)}
        return {name: getattr(self.module, name + suffix)(*a).to_host() for name, a in arguments.items()}


@pytest.fixture(scope="module", params=slow_but(["avx512", "avx2"], (name for name in CPUS if name != "amx")))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels.build(cpu_or_skip(request.param), tmp_path_factory.mktemp("int8"))


def random_inputs(rows: int) -> dict[str, F32]:
    """bf16 values, some of them large; row 3 is zeros."""
    rng = np.random.default_rng(rows)
    inputs = {}
    for name, width in (("x", 96), ("h", 112), ("wide", 1600)):
        values = rng.standard_normal((rows, width)).astype(np.float32)
        values[:, rng.integers(width)] *= 20
        values[3:4] = 0
        inputs[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return inputs


def rounded(x: F32) -> F32:
    """X quantised to bytes with one scale for each row, and dequantised."""
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30))
    kept: F32 = np.rint(x * (np.float32(127) / largest)) * (largest / np.float32(127))
    return kept


def expected(weights: dict[str, F32], inputs: dict[str, F32]) -> dict[str, F32]:
    x = inputs["x"]
    inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5)
    normed = rounded(x * weights["blk.0.attn_norm.weight"]) * inverse
    gate, up = np.split(normed @ weights["blk.0.ffn_gate_up.weight"].T, 2, axis=1)
    return {
        "plain": normed @ weights["blk.0.attn_qkv.weight"].T,
        "gated": gate / (1 + np.exp(-gate)) * up,
        "down": x + rounded(inputs["h"]) @ weights["blk.0.ffn_down.weight"].T,
        "output": x + rounded(inputs["wide"]) @ weights["blk.0.attn_output.weight"].T,
    }


@pytest.mark.parametrize("rows", ROWS)
def test_results_agree_with_numpy(kernels: Kernels, rows: int) -> None:
    inputs = random_inputs(rows)
    wanted = expected(kernels.weights.values, inputs)
    for name, got in kernels.outputs(inputs, rows).items():
        scale = np.abs(wanted[name]).max()
        tolerance = 5e-3 if name == "gated" else 2e-6  # the one is rounded to bf16 afterwards
        np.testing.assert_allclose(got / scale, wanted[name] / scale, rtol=0, atol=tolerance, err_msg=name)


def test_a_row_does_not_depend_on_its_batch(kernels: Kernels) -> None:
    inputs = random_inputs(ROWS[-1])
    everything = kernels.outputs(inputs, ROWS[-1])
    for rows, suffix in [*((rows, "") for rows in ROWS), *((few, f"_{few}") for few in FEW)]:
        for name, got in kernels.outputs(inputs, rows, suffix).items():
            np.testing.assert_array_equal(got, everything[name][:rows], err_msg=f"{name}{suffix} {rows}")


def test_results_have_the_bits_of_vnni(kernels: Kernels, tmp_path: Path) -> None:
    """But for gates on narrow vectors, which have another exponential."""
    if kernels.target is NO_TILES or not HOST.has_int8_dot:
        pytest.skip("nothing to compare with")
    inputs = random_inputs(17)
    found, expected = (each.outputs(inputs, 17) for each in (kernels, Kernels.build(NO_TILES, tmp_path)))
    for name in {*found} - ({"gated"} if not kernels.target.has_wide_vectors else set()):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(kernels: Kernels, odd: float) -> None:
    inputs = random_inputs(20)
    clean = kernels.outputs(inputs, 20)
    for values in inputs.values():
        values[17, 5] = odd
    others = np.arange(20) != 17
    for name, got in kernels.outputs(inputs, 20).items():
        assert not np.isfinite(got[17]).any(), name
        np.testing.assert_array_equal(got[others], clean[name][others])
