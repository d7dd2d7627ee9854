"""Operations that only linalg has, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.operations import LinalgOperations
from shortfin_apps.llm.builder.model.spec import BuildOptions
from shortfin_apps.llm.builder.weights.layout import weight_layout
from tests.builder.compiled_kernels import ConstantWeights, function, load
from tests.builder.compiled_model import HOST, TINY

BIAS = "blk.0.attn_qkv.bias"


def test_a_bias_is_added_to_every_row(tmp_path: Path) -> None:
    bias = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    weights = ConstantWeights({BIAS: bias}, {BIAS: weight_layout(BIAS, TINY, BuildOptions(), HOST)})
    operations = LinalgOperations(TINY, BuildOptions(), weights)

    def run(e: Emitter, x: Tensor) -> list[Tensor]:
        return [operations.add_bias(e, x, BIAS)]

    parts = [*weights.declarations(), function("run", {"x": ("?", 48)}, run)]
    x = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    actual = load("\n".join(["module @test {", *parts, "}"]), tmp_path).run(x).to_host()
    np.testing.assert_array_equal(actual, x + bias)
