"""Matmuls of weights in blocks of every type within a fused layer: against numpy, and the same bits on every
kind of CPU. With activations of 16 bits, weights are widened to bf16 and multiplied in tiles of AMX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.activations import QuantBlocks
from shortfin_apps.llm.builder.lowering.fused.layers import FusedLayers
from shortfin_apps.llm.builder.lowering.fused.stage_kernels import StageKernels
from shortfin_apps.llm.builder.lowering.lowering import RenderedKernels, Values
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.feed_forward import MLP
from shortfin_apps.llm.model.operations import Activation, GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.model.spec import ActivationBits, BuildOptions, ModelSpec, QuantBits
from shortfin_apps.llm.model.weight_blocks import BLOCK, Q4_1, Q8_0, BlockType
from tests.builder.agreement import expect, prefill_row
from tests.builder.compiled_kernels import (
    F32,
    NO_TILES,
    ROWS,
    ConstantWeights,
    Load,
    cpu_or_skip,
    function,
    load,
    narrow,
)
from tests.builder.compiled_model import DTYPES, HOST, TINY, CompiledModel
from tests.builder.emulated_tiles import target_and_load
from tests.builder.random_blocks import BLOCK_TYPES, GROUPED
from tests.builder.specs import changed, ffn_features
from tests.matrices import slow_but

INTEGERS = [each for each in BLOCK_TYPES if not each.is_e2m1]  # floats become such of 8 bits
# Groups of GPTQ may have any multiple of 32.
THREE_BLOCKS = BlockType(4, has_minima=True, group=96)
GATES: tuple[Activation, ...] = ("silu", "gelu")
SILU = GATES[:1]
BITS: tuple[QuantBits, ...] = (8, 12)
FLOATS: tuple[ActivationBits, ...] = (16,)
EMPTY = np.zeros((0, 0), np.float32)
NORM, GATE_UP, DOWN = (f"blk.0.ffn_{name}.weight" for name in ("norm", "gate_up", "down"))
PLAIN: list[Operation] = [Linear("h", "out", DOWN)]


def feed_forward(activation: Activation) -> list[Operation]:
    return [
        Norm("x", "normed", NORM),
        GatedLinear("normed", "gated", GATE_UP, activation),
        Linear("gated", "x", DOWN, residual="x"),
    ]


CASES: list[tuple[str, BlockType, Activation, ActivationBits]] = [
    *product(("amx", "avx512"), (*INTEGERS, THREE_BLOCKS), SILU, BITS),
    *product(("avx512-no-bf16", "avx512-no-vnni"), (Q8_0, Q4_1), SILU, BITS),
    *product(("avx-vnni", "avx2"), (Q8_0, Q4_1, THREE_BLOCKS), SILU, BITS),
    *product(("avx512-no-vnni", "avx-vnni", "avx2"), GROUPED[:1], SILU, BITS),
    *product(("amx", "avx512", "avx2"), (Q4_1,), GATES[1:], BITS),
    *product(("emulated-amx",), (Q8_0, Q4_1, GROUPED[0], GROUPED[2]), SILU, BITS),
    *product(("amx", "emulated-amx"), (*INTEGERS, THREE_BLOCKS), SILU, FLOATS),
    *product(("amx", "emulated-amx"), (Q4_1,), GATES[1:], FLOATS),
]
QUICK: list[tuple[str, BlockType, Activation, ActivationBits]] = [
    ("avx512", Q8_0, "silu", 8),
    ("avx512", GROUPED[0], "silu", 12),
    ("avx2", Q4_1, "gelu", 8),
    ("emulated-amx", Q4_1, "silu", 12),
    ("emulated-amx", Q4_1, "silu", 16),
    ("emulated-amx", GROUPED[4], "silu", 16),
]
# Deviations of a feed-forward from numpy: the largest of its own, and the smallest of one with another gate.
DEVIATIONS: dict[ActivationBits, tuple[float, float]] = {8: (1e-3, 4e-3), 12: (4e-4, 3e-3), 16: (1e-3, 3e-3)}


def sizes(kind: BlockType, activation: Activation) -> ModelSpec:
    """Without groups, matrices have an odd number of blocks and of panels; else `h` has two chunks of K."""
    hidden, ffn = (kind.spread, 768) if kind.spread > BLOCK else (160, 352)
    return changed(
        TINY,
        {
            "hidden_size": hidden,
            "features": ffn,
            "heads": ffn // 32,
            "kv_heads": 1,
            "head_dim": 32,
            "activation": activation,
        },
    )


def quantised(x: F32, bits: QuantBits) -> F32:
    """What blocks of `bits` bits leave of `x`, as quantise_blocks_function.mlir.j2 rounds it."""
    most = np.float32(QuantBlocks(x.shape[1], bits).most)
    blocks = x.reshape(len(x), -1, BLOCK)
    peak = np.maximum(np.abs(blocks).max(axis=2, keepdims=True), np.float32(1e-30))
    quants = np.rint(blocks * (most / peak))
    rounded: F32 = (quants * (peak / most)).reshape(x.shape)
    return rounded


def in_bf16(x: F32) -> F32:
    rounded: F32 = x.astype(DTYPES["bf16"]).astype(np.float32)
    return rounded


def nearest_bf16(w: F32) -> F32:
    """`w` in bf16, ties away from zero."""
    rounded: F32 = ((w.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    return rounded


def random_weights(spec: ModelSpec, kind: BlockType, target: Target) -> ConstantWeights:
    """Those of a feed-forward, with matrices in blocks of `kind`."""
    hidden, ffn = spec.hidden_size, ffn_features(spec)
    options = BuildOptions(weights="q8_0", block_types=((GATE_UP, kind), (DOWN, kind)))
    rng = np.random.default_rng(4)
    shapes = {NORM: (hidden,), GATE_UP: (2 * ffn, hidden), DOWN: (hidden, ffn)}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    layouts = {name: weight_layout(name, spec, options, target) for name in shapes}
    assert layouts[DOWN].blocks == kind
    return ConstantWeights(values, layouts)


@dataclass(frozen=True)
class Kernels:
    """`plain`: h . w^T, and `feed_forward`: x + down(silu(gate) * up) of x normed, with weights in blocks."""

    module: Any
    weights: ConstantWeights
    spec: ModelSpec
    target: Target
    bits: ActivationBits

    @classmethod
    def build(
        cls,
        kind: BlockType,
        target: Target,
        activation: Activation,
        bits: ActivationBits,
        folder: Path,
        load: Load = load,
    ) -> Kernels:
        spec = sizes(kind, activation)
        weights = random_weights(spec, kind, target)
        rendered = RenderedKernels()
        stages = StageKernels(spec, weights, "bf16", bits, target)
        layer = feed_forward(activation)
        operations = [Attend("qkv", "h", 0, spec.attention), *PLAIN, *layer]
        fused = FusedLayers(weights, rendered.render, operations, stages)

        def body(run: Sequence[Operation], out: str) -> Callable[[Emitter, Tensor], list[Tensor]]:
            def lower(e: Emitter, x: Tensor) -> list[Tensor]:
                values = Values({"x": x} if run is layer else {"h": narrow(e, x, "bf16")})
                fused.lower(e, run, values, [out])
                return [values[out]]

            return lower

        functions = [
            function("plain", {"h": ("?", ffn_features(spec))}, body(PLAIN, "out")),
            function("feed_forward", {"x": ("?", spec.hidden_size)}, body(layer, "x")),
        ]
        lines = ["module @kernels {", *weights.declarations(), *rendered.texts.values(), *functions, "}"]
        return cls(load("\n".join(lines), folder), weights, spec, target, bits)

    def inputs(self, rows: int) -> dict[str, F32]:
        """`h` and `x` in bf16, of which some columns are large and row 3 is zeros."""
        rng = np.random.default_rng(rows)
        widths = {"h": ffn_features(self.spec), "x": self.spec.hidden_size}
        inputs = {name: rng.standard_normal((rows, width), np.float32) for name, width in widths.items()}
        for each in inputs.values():
            each[:, 5] *= 20
            each[3:4] = 0
        return {name: in_bf16(each) for name, each in inputs.items()}

    def run(self, inputs: dict[str, F32], rows: int) -> dict[str, F32]:
        """The results for the first `rows` rows."""
        return {
            name: function(inputs[given][:rows]).to_host()
            for name, given, function in (
                ("plain", "h", self.module.plain),
                ("out", "x", self.module.feed_forward),
            )
            if inputs[given].size
        }

    @property
    def widens(self) -> bool:
        return self.bits == 16

    def rounded(self, x: F32) -> F32:
        """`x` as it is multiplied."""
        return in_bf16(x) if self.bits == 16 else quantised(x, self.bits)

    def reference_feed_forward(self, x: F32, activation: Activation) -> F32:
        w = self.weights.values
        if self.widens:
            w = w | {name: nearest_bf16(w[name]) for name in (GATE_UP, DOWN)}
        inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.spec.rms_norm_eps)
        gate, up = np.split(self.rounded(x * inverse * w[NORM]) @ w[GATE_UP].T, 2, axis=1)
        power = gate if activation == "silu" else 1.59576912 * (gate + 0.044715 * gate**3)
        gated = in_bf16(gate / (1 + np.exp(-power.clip(-80, 80))) * up)
        past: F32 = x + self.rounded(gated) @ w[DOWN].T
        return past


@pytest.fixture(scope="module", params=slow_but(QUICK, CASES), ids=lambda case: "-".join(map(str, case)))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    cpu, kind, activation, bits = request.param
    target, loading = target_and_load(cpu)
    return Kernels.build(kind, target, activation, bits, tmp_path_factory.mktemp("blocks"), loading)


def widened(kernels: Kernels) -> F32:
    """The weight DOWN [out, in] as it is multiplied: the products of the rows of an identity matrix."""
    features = ffn_features(kernels.spec)
    made: F32 = kernels.run({"h": np.eye(features, dtype=np.float32), "x": EMPTY}, features)["plain"].T
    return made


def test_only_activations_are_rounded(kernels: Kernels) -> None:
    """And with 16 bits, weights (below)."""
    inputs = kernels.inputs(ROWS[-1])
    w = (widened(kernels) if kernels.widens else kernels.weights.values[DOWN]).astype(np.float64)
    expected = kernels.rounded(inputs["h"]).astype(np.float64) @ w.T
    scale = np.abs(expected).max()
    found = kernels.run(inputs, ROWS[-1])["plain"]
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=2e-6)


def test_weights_are_widened_to_the_nearest_bf16(kernels: Kernels) -> None:
    """Except for the rounding of a sum that takes a 512th of a quant's step at most."""
    if not kernels.widens:
        pytest.skip("multiplies integers")
    w, found = kernels.weights.values[DOWN], widened(kernels)
    parts = w.reshape(len(w), -1, 16)
    step = np.repeat(np.ptp(parts, axis=2) / 6, 16, axis=1)  # sixteen of 4 bits are more than 6 steps apart
    assert (np.abs(found - w) <= 2.0**-8 * np.abs(w) + 2.0**-9 * step).all()
    np.testing.assert_array_equal(found, in_bf16(found))


def test_feed_forwards_agree_with_numpy(kernels: Kernels) -> None:
    """By a tolerance that tells gates apart, as theirs cannot leave the dispatch."""
    inputs = kernels.inputs(ROWS[-1])
    found = kernels.run(inputs, ROWS[-1])["out"]

    def deviation(activation: Activation) -> Any:
        expected = kernels.reference_feed_forward(inputs["x"], activation)
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    deviations = {gate: deviation(gate) for gate in GATES}
    own = deviations.pop(kernels.spec.blocks_of(MLP)[0].activation)
    most, least = DEVIATIONS[kernels.bits]
    assert own < most
    assert min(deviations.values()) > least


@pytest.fixture(scope="module")
def of_vnni(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The same for this CPU's vectors, which have AVX-512 VNNI."""
    if kernels.widens:
        pytest.skip("no integers")
    if kernels.target == NO_TILES or not HOST.has_int8_dot:
        pytest.skip("nothing to compare with")
    kind = kernels.weights.layout(DOWN).blocks
    assert kind is not None
    activation = kernels.spec.blocks_of(MLP)[0].activation
    return Kernels.build(kind, NO_TILES, activation, kernels.bits, tmp_path_factory.mktemp("vnni"))


def test_results_have_the_bits_of_vnni(kernels: Kernels, of_vnni: Kernels) -> None:
    """But for gates on narrow vectors, which have another exponential."""
    inputs = kernels.inputs(ROWS[-1])
    found, expected = (each.run(inputs, ROWS[-1]) for each in (kernels, of_vnni))
    for name in ("plain", "out") if kernels.target.has_wide_vectors else ("plain",):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("cpu", ["avx512", "avx512-no-vnni", "avx2"])
def test_a_model_agrees_with_numpy(cpu: str, bits: ActivationBits, device: Device, tmp_path: Path) -> None:
    target, spec = cpu_or_skip(cpu), changed(TINY, {"head_dim": 32})
    options = BuildOptions(
        weights="q4", prefill_batch_sizes=(1,), decode_batch_sizes=(2,), top_k=4, activation_bits=bits
    )
    model = CompiledModel.build(spec, options, device, tmp_path, target)
    tokens = (np.arange(1, 42) * 37) % spec.vocab_size
    table = np.array([[7, 3, 9], [4, 5, 6]])
    last = len(tokens) - 1
    expect(model, prefill_row(model, tokens[:last], table[:1], 16).logits[0], tokens[:last])
    decoded = model.decode("decode_bs2", tokens[[[last], [0]]], np.array([last, 0]), table)
    expect(model, decoded.logits[0], tokens)


def test_a_row_has_the_same_bits_in_every_batch(kernels: Kernels) -> None:
    inputs = kernels.inputs(ROWS[-1])
    everything = kernels.run(inputs, ROWS[-1])
    for rows in ROWS:
        for name, found in kernels.run(inputs, rows).items():
            np.testing.assert_array_equal(found, everything[name][:rows], err_msg=f"{name} of {rows}")


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_row_with_nan_or_infinity_is_not_finite_and_no_other_is(kernels: Kernels, odd: float) -> None:
    inputs = kernels.inputs(20)
    clean = kernels.run(inputs, 20)
    for each in inputs.values():
        each[[3, 17], 40] = odd
    others = np.delete(np.arange(20), [3, 17])
    for name, found in kernels.run(inputs, 20).items():
        odd_rows = found[[3, 17]]
        assert not np.isfinite(odd_rows).any() if kernels.widens else np.isnan(odd_rows).all(), name
        np.testing.assert_array_equal(found[others], clean[name][others])
