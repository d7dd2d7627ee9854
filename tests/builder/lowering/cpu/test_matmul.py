"""Norms and matmuls on vectors against numpy, over shapes that do not divide evenly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.cpu.matmul import VectorOperations
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.spec import BuildOptions, FloatType, ModelSpec, WeightType
from shortfin_apps.llm.model.weight_blocks import BlockType
from tests.builder.compiled_kernels import (
    F32,
    NAMES,
    NARROW,
    NO_TILES,
    ROWS,
    ConstantWeights,
    Inputs,
    function,
    load,
    narrow,
    widen,
)
from tests.builder.compiled_model import DTYPES, HOST, TINY
from tests.builder.random_blocks import BLOCK_TYPES
from tests.builder.specs import changed
from tests.matrices import slow_but

FLOATS = get_args(FloatType)
WIDENED: list[WeightType] = [kind for kind in get_args(WeightType) if kind not in ("int8", "fp8")]
# Weights, of which matrices have other blocks.
Kind = tuple[WeightType, BlockType | None]
TOLERANCE = {"bf16": 2e-2, "f16": 2e-3, "f32": 1e-5}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    ffn: int
    out: int


UNEVEN = Sizes(hidden=80, ffn=112, out=48)  # 48 and 80 leave half a panel
WHOLE_GROUPS = Sizes(hidden=256, ffn=512, out=48)
WHOLE_BLOCKS = Sizes(hidden=96, ffn=160, out=48)  # half a panel, so that they are not multiplied as integers


def make_weights(spec: ModelSpec, options: BuildOptions, target: Target, sizes: Sizes) -> ConstantWeights:
    rng = np.random.default_rng(0)
    shapes = {
        "blk.0.attn_qkv.weight": (sizes.out, sizes.hidden),
        "blk.0.ffn_down.weight": (sizes.hidden, sizes.ffn),
        "blk.0.ffn_gate_up.weight": (2 * sizes.ffn, sizes.hidden),
        "blk.0.ffn_norm.weight": (sizes.hidden,),
    }
    weights = {name: rng.standard_normal(shape, np.float32) / np.float32(2) for name, shape in shapes.items()}
    return ConstantWeights(weights, {name: weight_layout(name, spec, options, target) for name in shapes})


@dataclass(frozen=True)
class LinearKernels:
    options: BuildOptions
    sizes: Sizes
    weights: ConstantWeights
    module: Any

    @classmethod
    def build(cls, kind: Kind, target: Target, sizes: Sizes, folder: Path) -> LinearKernels:
        names = ("attn_qkv", "ffn_down", "ffn_gate_up") if kind[1] else ()
        types = tuple((f"blk.0.{name}.weight", kind[1]) for name in names if kind[1])
        options = BuildOptions(weights=kind[0], block_types=types)
        spec = changed(TINY, {"hidden_size": sizes.hidden, "features": sizes.ffn, "vocab_size": sizes.out})
        weights = make_weights(spec, options, target, sizes)
        rendered = RenderedKernels()
        operations = VectorOperations(LoweringContext(spec, options, target, weights, rendered))
        act = options.activations
        x: Inputs = {"x": ("?", sizes.hidden)}
        h: Inputs = {"h": ("?", sizes.ffn), "r": ("?", sizes.hidden)}

        def gated(e: Emitter, x: Tensor) -> list[Tensor]:
            return [
                widen(e, operations.gated_linear(e, narrow(e, x, act), "blk.0.ffn_gate_up.weight", "silu"))
            ]

        functions = [
            function(
                "plain", x, lambda e, x: [operations.linear(e, narrow(e, x, act), "blk.0.attn_qkv.weight")]
            ),
            function(
                "residual",
                h,
                lambda e, h, r: [operations.linear(e, narrow(e, h, act), "blk.0.ffn_down.weight", r)],
            ),
            function("gated", x, gated),
            function("norm", x, lambda e, x: [widen(e, operations.rms_norm(e, x, "blk.0.ffn_norm.weight"))]),
        ]
        text = "\n".join(
            ["module @kernels {", *weights.declarations(), *rendered.texts.values(), *functions, "}"]
        )
        return cls(options, sizes, weights, load(text, folder))

    def activations(self, rng: np.random.Generator, rows: int, width: int) -> F32:
        return rng.standard_normal((rows, width)).astype(DTYPES[self.options.activations]).astype(np.float32)


CASES: list[tuple[Kind, Target, Sizes]] = [
    *(((kind, None), target, UNEVEN) for kind in FLOATS for target in (HOST, NARROW)),
    *(((kind, None), target, WHOLE_BLOCKS) for kind in WIDENED for target in (NO_TILES, NARROW)),
    *((("q8_0", kind), target, WHOLE_GROUPS) for kind in BLOCK_TYPES for target in (NO_TILES, NARROW)),
]


@pytest.fixture(
    scope="module",
    params=slow_but(CASES[::9], CASES),
    ids=lambda c: f"{c[0][1] or c[0][0]}-{NAMES[c[1].features]}-{c[2].hidden}",
)
def linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LinearKernels:
    kind, target, sizes = request.param
    return LinearKernels.build(kind, target, sizes, tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("rows", ROWS)
def test_results_agree_with_numpy(linear: LinearKernels, rows: int) -> None:
    sizes, module, weights = linear.sizes, linear.module, linear.weights.values
    rng = np.random.default_rng(rows)

    def check(actual: Any, expected: F32) -> None:
        scale = np.abs(expected).max()
        tolerance = TOLERANCE[linear.options.activations]
        np.testing.assert_allclose(actual.to_host() / scale, expected / scale, rtol=0, atol=tolerance)

    x, h = linear.activations(rng, rows, sizes.hidden), linear.activations(rng, rows, sizes.ffn)
    r = linear.activations(rng, rows, sizes.hidden)
    check(module.plain(x), x @ weights["blk.0.attn_qkv.weight"].T)
    check(module.residual(h, r), r + h @ weights["blk.0.ffn_down.weight"].T)
    gate, up = np.split(x @ weights["blk.0.ffn_gate_up.weight"].T, 2, axis=1)
    check(module.gated(x), gate / (1 + np.exp(-gate)) * up)
    inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5)
    check(module.norm(x), x * inverse * weights["blk.0.ffn_norm.weight"])


def test_a_row_does_not_depend_on_its_batch(linear: LinearKernels) -> None:
    rng = np.random.default_rng(1)
    h = linear.activations(rng, ROWS[-1], linear.sizes.ffn)
    x = linear.activations(rng, ROWS[-1], linear.sizes.hidden)
    module = linear.module

    def compute(rows: int) -> list[F32]:
        results = (module.plain(x[:rows]), module.residual(h[:rows], x[:rows]), module.gated(x[:rows]))
        return [result.to_host() for result in results]

    everything = compute(ROWS[-1])
    for rows in ROWS:
        for part, whole in zip(compute(rows), everything, strict=True):
            np.testing.assert_array_equal(part, whole[:rows])
