"""Matrices in blocks as integers on vectors: against numpy, and against AMX, whose bits they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.blocks import BLOCK, Q4_1, Q8_0, BlockType
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.amx.fused_layer import FusedLayers
from shortfin_apps.llm.builder.lowering.cpu.block_int8 import BlockInt8Operations
from shortfin_apps.llm.builder.lowering.lowering import RenderedKernels, Values
from shortfin_apps.llm.builder.model.operations import Attend, GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.builder.model.spec import Activation, BuildOptions, ModelSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import weight_layout
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.host_cpu import missing_features
from tests.builder.agreement import expect, prefill_row
from tests.builder.compiled_kernels import F32, NO_TILES, ROWS, ConstantWeights, function, load, narrow, widen
from tests.builder.compiled_model import DTYPES, HOST, TINY, CompiledModel
from tests.builder.random_blocks import BLOCK_TYPES, GROUPED

INTEGERS = [each for each in BLOCK_TYPES if not each.is_e2m1]  # floats become such of 8 bits
# Groups of GPTQ may have any multiple of 32.
THREE_BLOCKS = BlockType(4, has_minima=True, group=96)
NORM, GATE_UP, DOWN = (f"blk.0.ffn_{name}.weight" for name in ("norm", "gate_up", "down"))
RUN: list[Operation] = [
    Norm("x", "normed", NORM),
    GatedLinear("normed", "gated", GATE_UP),
    Linear("gated", "x", DOWN, residual="x"),
]
# The same CPU without the instruction that rounds to bf16, as Cascade Lake is.
NO_BF16 = replace(NO_TILES, features=NO_TILES.features - {"avx512bf16"})
# And without wide vectors.
AVX2 = replace(HOST, features=frozenset({"avx2", "fma", "f16c"}))
AVX_VNNI = replace(HOST, features=AVX2.features | {"avxvnni"})
TARGETS = {"avx512": NO_TILES, "no-bf16": NO_BF16, "avx-vnni": AVX_VNNI, "avx2": AVX2}
WIDE = ("avx512", "no-bf16")


def skip_unless_this_cpu_is(target: str) -> None:
    """The wide targets are this CPU's own features, the narrow ones those that they name."""
    if target in WIDE:
        missing = [] if HOST.has_int8_dot else ["AVX-512 VNNI"]
    else:
        missing = missing_features(TARGETS[target].features)
    if missing:
        pytest.skip(f"this CPU has no {', '.join(missing)}")


def sizes(kind: BlockType, activation: Activation) -> ModelSpec:
    """Without groups, matrices have an odd number of blocks and of panels."""
    hidden, ffn = (kind.spread, 768) if kind.spread > BLOCK else (160, 352)
    return replace(
        TINY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=ffn // 32,
        num_key_value_heads=1,
        head_dim=32,
        activation=activation,
    )


def quantised(x: F32) -> F32:
    """What blocks of 8 bits leave of `x`, as quantise_blocks_function.mlir.j2 rounds it."""
    blocks = x.reshape(len(x), -1, BLOCK)
    peak = np.maximum(np.abs(blocks).max(axis=2, keepdims=True), np.float32(1e-30))
    quants = np.rint(blocks * (np.float32(127) / peak))
    rounded: F32 = (quants * (peak / np.float32(127))).reshape(x.shape)
    return rounded


@dataclass(frozen=True)
class Kernels:
    """`plain`: h . w^T, and `feed_forward`: x + down(silu(gate) * up) of x normed, with weights in blocks."""

    module: Any
    weights: ConstantWeights
    spec: ModelSpec
    target: Target

    @classmethod
    def build(cls, kind: BlockType, target: Target, activation: Activation, folder: Path) -> Kernels:
        spec = sizes(kind, activation)
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        options = BuildOptions(weights="q8_0", block_types=((GATE_UP, kind), (DOWN, kind)))
        rng = np.random.default_rng(4)
        shapes = {NORM: (hidden,), GATE_UP: (2 * ffn, hidden), DOWN: (hidden, ffn)}
        values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        layouts = {name: weight_layout(name, spec, options, target) for name in shapes}
        assert layouts[DOWN].blocks == kind
        weights = ConstantWeights(values, layouts)
        rendered = RenderedKernels()
        operations = BlockInt8Operations(spec, options, target, weights, rendered.render)

        def plain(e: Emitter, h: Tensor) -> list[Tensor]:
            return [operations.linear(e, narrow(e, h, "bf16"), DOWN)]

        def feed_forward(e: Emitter, x: Tensor) -> list[Tensor]:
            gated = operations.gated_linear(e, operations.rms_norm(e, x, NORM), GATE_UP)
            return [operations.linear(e, gated, DOWN, x), widen(e, gated.x)]

        functions = [
            function("plain", {"h": ("?", ffn)}, plain),
            function("feed_forward", {"x": ("?", hidden)}, feed_forward),
        ]
        if HOST.has_amx_int8:
            functions += in_tiles(spec, weights, rendered)
        lines = ["module @kernels {", *weights.declarations(), *rendered.texts.values(), *functions, "}"]
        return cls(load("\n".join(lines), folder), weights, spec, target)

    def inputs(self, rows: int) -> dict[str, F32]:
        """`h` and `x`, of which some columns are large and row 3 is zeros."""
        rng = np.random.default_rng(rows)
        widths = {"h": self.spec.intermediate_size, "x": self.spec.hidden_size}
        inputs = {name: rng.standard_normal((rows, width), np.float32) for name, width in widths.items()}
        for each in inputs.values():
            each[:, 5] *= 20
            each[3:4] = 0
        return {name: each.astype(DTYPES["bf16"]).astype(np.float32) for name, each in inputs.items()}

    def run(self, inputs: dict[str, F32], rows: int) -> dict[str, F32]:
        """The results for the first `rows` rows."""
        out, gated = (each.to_host() for each in self.module.feed_forward(inputs["x"][:rows]))
        return {"plain": self.module.plain(inputs["h"][:rows]).to_host(), "out": out, "gated": gated}


def in_tiles(spec: ModelSpec, weights: ConstantWeights, rendered: RenderedKernels) -> list[str]:
    """Both functions on AMX."""
    plain = [Linear("h", "out", DOWN)]
    fused = FusedLayers(spec, weights, rendered.render, [Attend("qkv", "h", 0), *plain, *RUN])

    def body(run: Sequence[Operation], out: str) -> Callable[[Emitter, Tensor], list[Tensor]]:
        def lower(e: Emitter, x: Tensor) -> list[Tensor]:
            values = Values({"x": x} if run is RUN else {"h": narrow(e, x, "bf16")})
            fused.lower(e, run, values, [out])
            return [values[out]]

        return lower

    return [
        function("plain_in_tiles", {"h": ("?", spec.intermediate_size)}, body(plain, "out")),
        function("feed_forward_in_tiles", {"x": ("?", spec.hidden_size)}, body(RUN, "x")),
    ]


CASES: list[tuple[BlockType, str, Activation]] = [
    *((kind, "avx512", "silu") for kind in (*INTEGERS, THREE_BLOCKS)),
    *((kind, target, "silu") for kind in (Q8_0, Q4_1) for target in ("no-bf16", "avx-vnni", "avx2")),
    *((Q4_1, target, "gelu") for target in ("avx512", "avx2")),
    *((kind, target, "silu") for kind in GROUPED[:1] for target in ("avx-vnni", "avx2")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    kind, target, activation = request.param
    skip_unless_this_cpu_is(target)
    return Kernels.build(kind, TARGETS[target], activation, tmp_path_factory.mktemp("blocks"))


def test_only_activations_are_rounded(kernels: Kernels) -> None:
    inputs = kernels.inputs(ROWS[-1])
    found, w = kernels.run(inputs, ROWS[-1]), kernels.weights.values
    wanted = {
        "plain": quantised(inputs["h"]).astype(np.float64) @ w[DOWN].T.astype(np.float64),
        "out": inputs["x"] + quantised(found["gated"]).astype(np.float64) @ w[DOWN].T.astype(np.float64),
    }
    for name, expected in wanted.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found[name] / scale, expected / scale, rtol=0, atol=2e-6, err_msg=name)


def test_gates_agree_with_numpy(kernels: Kernels) -> None:
    x, w = kernels.inputs(ROWS[-1])["x"], kernels.weights.values
    inverse = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + kernels.spec.rms_norm_eps)
    gate, up = np.split(quantised(x * inverse * w[NORM]) @ w[GATE_UP].T, 2, axis=1)
    power = gate if kernels.spec.activation == "silu" else 1.59576912 * (gate + 0.044715 * gate**3)
    expected = gate / (1 + np.exp(-power.clip(-80, 80))) * up
    found = kernels.run(kernels.inputs(ROWS[-1]), ROWS[-1])["gated"]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-2)


@pytest.mark.skipif(not HOST.has_amx_int8, reason="this CPU has no AMX with int8")
@pytest.mark.parametrize("rows", ROWS)
def test_results_have_the_bits_of_amx(kernels: Kernels, rows: int) -> None:
    """But for gates on narrow vectors, which have another exponential."""
    inputs = kernels.inputs(rows)
    found, module = kernels.run(inputs, rows), kernels.module
    np.testing.assert_array_equal(found["plain"], module.plain_in_tiles(inputs["h"]).to_host())
    if kernels.target.has_wide_vectors:
        np.testing.assert_array_equal(found["out"], module.feed_forward_in_tiles(inputs["x"]).to_host())


@pytest.mark.parametrize("target", ["avx512", "avx2"])
def test_a_model_agrees_with_numpy(target: str, device: Device, tmp_path: Path) -> None:
    skip_unless_this_cpu_is(target)
    spec = replace(TINY, head_dim=32)
    options = BuildOptions(weights="q4", prefill_batch_sizes=(1,), decode_batch_sizes=(2,), top_k=4)
    model = CompiledModel.build(spec, options, device, tmp_path, TARGETS[target])
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
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(kernels: Kernels, odd: float) -> None:
    inputs = kernels.inputs(20)
    clean = kernels.run(inputs, 20)
    for each in inputs.values():
        each[[3, 17], 40] = odd
    others = np.delete(np.arange(20), [3, 17])
    for name, found in kernels.run(inputs, 20).items():
        assert np.isnan(found[[3, 17]]).any(axis=1).all(), name
        np.testing.assert_array_equal(found[others], clean[name][others])
