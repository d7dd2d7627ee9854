"""Matmuls of weights in blocks of every type on AMX: exact but for the quantisation of the activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.blocks import BLOCK, BlockType
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.amx.fused_layer import FusedLayers
from shortfin_apps.llm.builder.lowering.lowering import RenderedKernels, Values
from shortfin_apps.llm.builder.model.operations import Attend, Linear
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.builder.weights.layout import weight_layout
from tests.builder.compiled_kernels import F32, ConstantWeights, function, load, narrow
from tests.builder.compiled_model import DTYPES, HOST, TINY
from tests.builder.random_blocks import BLOCK_TYPES

INTEGERS = [each for each in BLOCK_TYPES if not each.is_e2m1]  # floats become such of 8 bits
# Groups of GPTQ may have any multiple of 32.
THREE_BLOCKS = BlockType(4, has_minima=True, group=96)
WEIGHT = "blk.0.attn_output.weight"
OUT = 160
ROWS = [1, 7, 15, 16, 18, 40]

pytestmark = pytest.mark.skipif(not HOST.has_amx_int8, reason="this CPU has no AMX with int8")


def sizes(columns: int) -> ModelSpec:
    """A model whose output projection has so many input features."""
    return replace(
        TINY, hidden_size=OUT, num_attention_heads=columns // 32, num_key_value_heads=1, head_dim=32
    )


def quantised(x: F32) -> F32:
    """What blocks of 8 bits leave of `x`, as quantise_blocks_function.mlir.j2 rounds it."""
    blocks = x.reshape(len(x), -1, BLOCK)
    peak = np.maximum(np.abs(blocks).max(axis=2, keepdims=True), np.float32(1e-30))
    quants = np.rint(blocks * (np.float32(127) / peak))
    rounded: F32 = (quants * (peak / np.float32(127))).reshape(x.shape)
    return rounded


@dataclass(frozen=True)
class Projection:
    """x + attended . w^T, with w in blocks."""

    module: Any
    w: F32

    def inputs(self) -> tuple[F32, F32]:
        rng = np.random.default_rng(5)
        x = rng.standard_normal((ROWS[-1], OUT), np.float32)
        attended = rng.standard_normal((ROWS[-1], self.w.shape[1]), np.float32)
        return x, attended.astype(DTYPES["bf16"]).astype(np.float32)

    def run(self, x: F32, attended: F32) -> F32:
        result: F32 = self.module.project(x, attended).to_host()
        return result


@pytest.fixture(scope="module", params=[*INTEGERS, THREE_BLOCKS], ids=str)
def projection(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Projection:
    kind: BlockType = request.param
    # Two chunks of K; or, where groups allow it, an odd block at the end.
    spec = sizes(768 if kind.spread > BLOCK else 352)
    options = BuildOptions(weights="q8_0", block_types=((WEIGHT, kind),))
    layout = weight_layout(WEIGHT, spec, options, HOST)
    assert layout.blocks == kind
    columns = spec.num_attention_heads * spec.head_dim
    values = np.random.default_rng(4).standard_normal((OUT, columns), np.float32)
    weights = ConstantWeights({WEIGHT: values}, {WEIGHT: layout})
    rendered = RenderedKernels()
    run = [Linear("attended", "x", WEIGHT, residual="x")]
    fused = FusedLayers(spec, weights, rendered.render, [Attend("qkv", "attended", 0), *run])

    def project(e: Emitter, x: Tensor, attended: Tensor) -> list[Tensor]:
        values = Values({"x": x, "attended": narrow(e, attended, "bf16")})
        fused.lower(e, run, values, ["x"])
        return [values["x"]]

    text = function("project", {"x": ("?", OUT), "attended": ("?", columns)}, project)
    lines = ["module @kernels {", *weights.declarations(), *rendered.texts.values(), text, "}"]
    return Projection(load("\n".join(lines), tmp_path_factory.mktemp("blocks")), weights.values[WEIGHT])


def test_only_activations_are_rounded(projection: Projection) -> None:
    x, attended = projection.inputs()
    expected = x + quantised(attended).astype(np.float64) @ projection.w.T.astype(np.float64)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(projection.run(x, attended) / scale, expected / scale, rtol=0, atol=2e-6)


def test_a_row_has_the_same_bits_in_every_batch(projection: Projection) -> None:
    x, attended = projection.inputs()
    everything = projection.run(x, attended)
    for rows in ROWS:
        np.testing.assert_array_equal(projection.run(x[:rows], attended[:rows]), everything[:rows])


def test_a_row_with_nan_is_nan_and_no_other(projection: Projection) -> None:
    x, attended = projection.inputs()
    expected = projection.run(x, attended)
    attended[[3, 38], 40] = np.nan
    found = projection.run(x, attended)
    others = np.delete(np.arange(len(x)), [3, 38])
    assert np.isnan(found[[3, 38]]).all()
    np.testing.assert_array_equal(found[others], expected[others])
