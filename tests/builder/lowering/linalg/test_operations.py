"""Operations that only linalg has, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.operations import LinalgOperations
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.attention import NormHeads
from shortfin_apps.llm.model.operations import AddBias
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_kernels import ConstantWeights, function, load
from tests.builder.compiled_model import HOST, TINY
from tests.builder.specs import changed

BIAS, NORM = "blk.0.attn_qkv.bias", "blk.0.attn_qk_norm.weight"


def test_a_bias_is_added_to_every_row(tmp_path: Path) -> None:
    bias = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    spec = changed(TINY, {"bias": True})
    weights = ConstantWeights({BIAS: bias}, {BIAS: weight_layout(BIAS, spec, BuildOptions(), HOST)})
    operations = LinalgOperations(LoweringContext(spec, BuildOptions(), HOST, weights))

    def run(e: Emitter, x: Tensor) -> list[Tensor]:
        return [operations.compute(e, AddBias("x", "x", BIAS), Values({"x": x}))]

    parts = [*weights.declarations(), function("run", {"x": ("?", 48)}, run)]
    x = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    actual = load("\n".join(["module @test {", *parts, "}"]), tmp_path).run(x).to_host()
    np.testing.assert_array_equal(actual, x + bias)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_heads_of_queries_and_keys_are_normed_and_values_are_not(
    tmp_path: Path, tokens: int, head_dim: int
) -> None:
    """One token is static: IREE 3.9 has vectorised that wrong."""
    spec = changed(TINY, {"head_dim": head_dim, "qk_norm": True})
    rng = np.random.default_rng(2)
    weight = rng.standard_normal(2 * head_dim).astype(np.float32)
    layouts = {NORM: weight_layout(NORM, spec, BuildOptions(), HOST)}
    weights = ConstantWeights({NORM: weight}, layouts)
    operations = LinalgOperations(LoweringContext(spec, BuildOptions(), HOST, weights))

    def run(e: Emitter, x: Tensor) -> list[Tensor]:
        return [operations.compute(e, NormHeads("x", "x", NORM, spec.attention), Values({"x": x}))]

    rows = 1 if tokens == 1 else "?"
    parts = [*weights.declarations(), function("run", {"x": (rows, spec.attention.qkv_features)}, run)]
    x = rng.standard_normal((tokens, spec.attention.qkv_features)).astype(np.float32)
    actual = load("\n".join(["module @test {", *parts, "}"]), tmp_path).run(x).to_host()
    heads = x.reshape(tokens, -1, head_dim).copy()
    turned = heads[:, :6]
    rms = np.sqrt(np.mean(turned**2, axis=2, keepdims=True) + spec.rms_norm_eps)
    heads[:, :6] = turned / rms * np.repeat(weight.reshape(2, -1), [4, 2], axis=0)
    np.testing.assert_allclose(actual, heads.reshape(x.shape), rtol=1e-5, atol=1e-6)
