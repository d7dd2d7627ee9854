"""The fused layer on every kind of CPU: against numpy, its batch invariance, and more workers than cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.choose import FUSED_LAYER, choose, make_lowering
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.operations import Operation
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType, weight_shapes
from shortfin_apps.llm.model.weight_blocks import Q8_0, BlockType
from tests.builder.compiled_kernels import (
    F32,
    ROWS,
    ConstantWeights,
    Inputs,
    Load,
    cpu_or_skip,
    function,
    load,
    narrow,
)
from tests.builder.compiled_model import TINY
from tests.builder.crowd import check_in_a_crowd
from tests.builder.emulated_tiles import target_and_load
from tests.builder.specs import changed
from tests.matrices import slow_but

# Sizes that cut K into chunks of unequal length and panels into partitions of unequal width.
SPEC = changed(TINY, {"hidden_size": 352, "features": 1056, "vocab_size": 160}, layers=2)
TOLERANCE = 3e-2
KINDS: list[WeightType] = ["bf16", "q8_0", "q4", "int8"]
# In one layer a gate in blocks of 4 bits feeds blocks of 8; in the other one in floats feeds blocks.
MIXED: dict[str, BlockType | None] = {
    "blk.0.attn_output.weight": BlockType(8, 16, has_minima=True, group=32),
    "blk.0.ffn_down.weight": Q8_0,
    "blk.1.attn_qkv.weight": None,
    "blk.1.attn_output.weight": None,
    "blk.1.ffn_gate_up.weight": None,
    SPEC.head_weight: None,
}

CASES: list[tuple[str, WeightType, dict[str, BlockType | None]]] = [
    *((cpu, kind, {}) for cpu in ("amx", "avx512") for kind in KINDS),
    *((cpu, "q4", MIXED) for cpu in ("amx", "avx512", "avx512-no-bf16", "avx2")),
    *((cpu, kind, {}) for cpu in ("avx512-no-bf16", "avx2") for kind in ("bf16", "f16", "f32")),
    *(("emulated-amx", kind, {}) for kind in ("bf16", "f16", "int8", "q8_0")),
    *(("avx512-no-bf16", "int8", {}), ("avx2", "q8_0", {}), ("avx2", "int8", {})),
]


def make_weights(
    spec: ModelSpec, options: BuildOptions, target: Target, gate_gain: float = 1.0
) -> ConstantWeights:
    """Random weights; gate and up are multiplied by `gate_gain`."""
    rng = np.random.default_rng(0)
    shapes = weight_shapes(spec)
    values = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name, value in values.items():
        if name.endswith("ffn_gate_up.weight"):
            value *= gate_gain
    return ConstantWeights(values, {name: weight_layout(name, spec, options, target) for name in shapes})


def layer_operations(spec: ModelSpec, number: int) -> list[Operation]:
    """A layer's attention and all up to the next one's, or to the last of the layers."""
    model = list(spec.operations())
    begins = [index for index, operation in enumerate(model) if isinstance(operation, Attend)]
    return model[begins[number] : [*begins[1:], len(model) - 3][number]]


@dataclass(frozen=True)
class Layers:
    """`advance` and `finish` are the layers of a model of two."""

    module: Any
    weights: dict[str, F32]
    vmfb: Path
    is_emulated: bool = False

    def reference_projection(self, x: F32, layer: int) -> F32:
        h = self._norm(x, f"blk.{layer}.attn_norm.weight")
        qkv: F32 = h @ self.weights[f"blk.{layer}.attn_qkv.weight"].T
        return qkv

    def reference_layer(self, x: F32, attended: F32, layer: int, largest: float = np.inf) -> F32:
        block = f"blk.{layer}."
        x = x + attended @ self.weights[f"{block}attn_output.weight"].T
        h = self._norm(x, f"{block}ffn_norm.weight")
        gate, up = np.split(h @ self.weights[f"{block}ffn_gate_up.weight"].T, 2, axis=1)
        gated: F32 = (gate / (1 + np.exp(-gate.clip(-80)))).astype(np.float32) * up
        gated = gated.clip(-largest, largest)
        past: F32 = x + gated @ self.weights[f"{block}ffn_down.weight"].T
        return past

    def reference_logits(self, x: F32) -> F32:
        logits: F32 = self._norm(x, "output_norm.weight") @ self.weights[SPEC.head_weight].T
        return logits

    def _norm(self, x: F32, weight: str) -> F32:
        root = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + SPEC.rms_norm_eps)
        normed: F32 = x / root * self.weights[weight]
        return normed


@pytest.fixture(
    scope="module",
    params=slow_but([("avx512", "bf16", {}), ("avx512", "q4", MIXED), ("avx2", "f32", {})], CASES),
    ids=[f"{cpu}-{'mixed' if others else kind}" for cpu, kind, others in CASES],
)
def layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layers:
    cpu, kind, others = request.param
    options = BuildOptions(weights=kind, block_types=tuple(others.items()))
    target, load = target_and_load(cpu)
    layers = build(options, target, tmp_path_factory.mktemp("layers"), load)
    return replace(layers, is_emulated=cpu == "emulated-amx")


def build(
    options: BuildOptions, target: Target, folder: Path, load: Load = load, gate_gain: float = 1.0
) -> Layers:
    weights = make_weights(SPEC, options, target, gate_gain)
    context = LoweringContext(SPEC, options, target, weights)
    choices = choose(context)
    assert FUSED_LAYER in [choice.candidate for choice in choices]
    lowering = make_lowering(context, choices)
    x: Inputs = {"x": ("?", SPEC.hidden_size)}
    both: Inputs = x | {"attended": ("?", SPEC.attention.q_features)}

    def lower(e: Emitter, run: list[Operation], tensors: dict[str, Tensor], *results: str) -> list[Tensor]:
        values = Values(tensors)
        lowering.lower(e, run, values, results)
        return [values[name] for name in results]

    def layer(e: Emitter, x: Tensor, attended: Tensor, number: int, *results: str) -> list[Tensor]:
        run = layer_operations(SPEC, number)[1:]
        return lower(e, run, {"x": x, "attended": narrow(e, attended, options.activations)}, *results)

    model = list(SPEC.operations())
    functions = [
        function("run_project", x, lambda e, x: lower(e, model[1:3], {"x": x}, "qkv")),
        function("run_advance", both, lambda e, x, attended: layer(e, x, attended, 0, "x", "qkv")),
        function("run_finish", both, lambda e, x, attended: layer(e, x, attended, 1, "x")),
        function("run_logits", x, lambda e, x: lower(e, model[-2:], {"x": x}, "logits")),
    ]
    text = "\n".join(["module @layers {", *weights.declarations(), *lowering.declarations(), *functions, "}"])
    return Layers(load(text, folder), weights.values, folder / "kernel.vmfb")


def make_inputs(rows: int) -> tuple[F32, F32]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, SPEC.hidden_size)).astype(np.float32)
    attended = rng.standard_normal((rows, SPEC.attention.q_features)).astype(np.float32)
    return x, attended


def check(actual: Any, expected: F32) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual.to_host() / scale, expected / scale, rtol=0, atol=TOLERANCE)


# From 384 rows on, matmuls are partitioned by rows.
@pytest.mark.parametrize("rows", [*ROWS, 600])
def test_layers_agree_with_numpy(layers: Layers, rows: int) -> None:
    x, attended = make_inputs(rows)
    check(layers.module.run_project(x), layers.reference_projection(x, 0))
    past, qkv = layers.module.run_advance(x, attended)
    expected = layers.reference_layer(x, attended, 0)
    check(past, expected)
    check(qkv, layers.reference_projection(expected, 1))
    check(layers.module.run_finish(x, attended), layers.reference_layer(x, attended, 1))
    check(layers.module.run_logits(x), layers.reference_logits(x))


def test_results_are_batch_invariant(layers: Layers) -> None:
    x, attended = make_inputs(600)

    def compute(rows: int) -> list[F32]:
        past, qkv = layers.module.run_advance(x[:rows], attended[:rows])
        results = (past, qkv, layers.module.run_project(x[:rows]), layers.module.run_logits(x[:rows]))
        return [result.to_host() for result in results]

    everything = compute(600)
    for rows in ROWS:
        for part, whole in zip(compute(rows), everything, strict=True):
            np.testing.assert_array_equal(part, whole[:rows])


@pytest.mark.slow
def test_f16_in_tiles_saturates_where_others_keep_f32(tmp_path_factory: pytest.TempPathFactory) -> None:
    x, attended = make_inputs(40)
    for cpu, largest in (("emulated-amx", 65504.0), ("avx512-no-bf16", np.inf)):
        target, load = target_and_load(cpu)
        layers = build(
            BuildOptions(weights="f16"), target, tmp_path_factory.mktemp(cpu), load, gate_gain=6000
        )
        past, _ = layers.module.run_advance(x, attended)
        expected = layers.reference_layer(x, attended, 0, largest)
        check(past, expected)
        unbounded = layers.reference_layer(x, attended, 0)
        assert (np.abs(unbounded - expected).max() > 0.5 * np.abs(expected).max()) == np.isfinite(largest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "int8", "q8_0"])
def test_emulated_tiles_are_as_those_of_this_cpu(
    kind: WeightType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    x, attended = make_inputs(40)

    def compute(cpu: str) -> list[Any]:
        target, load = target_and_load(cpu)
        layers = build(BuildOptions(weights=kind), target, tmp_path_factory.mktemp("tiles"), load)
        return list(layers.module.run_advance(x, attended))

    for expected, found in zip(compute("amx"), compute("emulated-amx"), strict=True):
        check(found, expected.to_host())


@pytest.mark.slow
def test_int8_gives_the_same_bits_on_vectors(tmp_path_factory: pytest.TempPathFactory) -> None:
    x, attended = make_inputs(600)
    tiles, vectors = (
        build(BuildOptions(weights="int8"), cpu_or_skip(cpu), tmp_path_factory.mktemp("bytes"))
        for cpu in ("amx", "avx512")
    )
    for one, other in zip(
        tiles.module.run_advance(x, attended), vectors.module.run_advance(x, attended), strict=True
    ):
        np.testing.assert_array_equal(one.to_host(), other.to_host())


@pytest.mark.parametrize("rows", [5, 18])
def test_zeros_and_nan_do_not_affect_other_rows(layers: Layers, rows: int) -> None:
    x, attended = make_inputs(rows)
    expected, _ = (result.to_host() for result in layers.module.run_advance(x, attended))
    x[1] = attended[1] = 0
    attended[3, 7] = np.nan
    past, _ = (result.to_host() for result in layers.module.run_advance(x, attended))
    np.testing.assert_array_equal(past[1], 0)
    assert np.isnan(past[3]).all()
    others = np.delete(np.arange(rows), [1, 3])
    np.testing.assert_array_equal(past[others], expected[others])


@pytest.mark.parametrize("rows", [1, 40])
def test_more_workers_than_cores_finish_with_the_same_result(
    layers: Layers, rows: int, tmp_path: Path
) -> None:
    if layers.is_emulated:
        pytest.skip("emulated tiles are not of a worker's own")
    x, attended = make_inputs(rows)
    expected = [result.to_host() for result in layers.module.run_advance(x, attended)]
    check_in_a_crowd(layers.vmfb, "run_advance", [x, attended], expected, tmp_path, calls=100)
