from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.builder.self_test import stored_weights
from shortfin_apps.llm.builder.self_test.stored_weights import StoredWeights
from shortfin_apps.llm.builder.sources.random_tiny import SPEC, RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.specs import with_experts

# How far a weight may be from the source's, in parts of the largest of its row.
ROUNDING: dict[WeightType, float] = {
    "f32": 0.0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.005,
    "q4": 0.1,
    "int8": 0.005,
    "fp8": 0.1,
}


@pytest.mark.parametrize("device", ["cpu", "hip:gfx942"])
@pytest.mark.parametrize("weights", ROUNDING)
def test_weights_are_the_sources_rounded_and_rows_and_slices_are_parts_of_them(
    device: str, weights: WeightType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (device == "cpu") == (weights == "fp8") or (device != "cpu" and weights == "int8"):
        pytest.skip("not a type for the device")
    monkeypatch.setattr(stored_weights, "HEAD_ROWS", 100)
    source, options = RandomTinySource(), BuildOptions.for_device(device, weights=weights)
    stored = StoredWeights(source, options, resolve_target(device))
    for weight in plan_weights(SPEC):
        value, exact = stored.whole(weight.name), weight.load(source).astype(np.float32)
        assert value.shape == weight.shape
        assert value.dtype == np.float32
        allowed = ROUNDING[weights] * np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(value - exact) <= allowed).all(), weight.name
    head = stored.whole("output.weight")
    np.testing.assert_array_equal(np.concatenate(list(stored.slices("output.weight"))), head)
    rows = np.array([3, 3, 200, 0])
    np.testing.assert_array_equal(stored.rows("output.weight", rows), head[rows])
    block = stored.block(1)
    np.testing.assert_array_equal(block["attn_norm.weight"], stored.whole("blk.1.attn_norm.weight"))


def test_weights_in_blocks_are_those_that_are_written() -> None:
    source, options = RandomTinySource(), BuildOptions(weights="q4")
    target = resolve_target("cpu")
    stored = StoredWeights(source, options, target)
    for weight in plan_weights(SPEC):
        kind = weight_layout(weight.name, SPEC, options, target).blocks
        if kind is not None:
            expected = weight.load_blocks(source, kind).dequantise()
            np.testing.assert_array_equal(stored.whole(weight.name), expected)


def test_experts_are_stacked() -> None:
    from shortfin_apps.llm.model.feed_forward import MoE

    spec = with_experts(SPEC, MoE(count=3, per_token=2, features=32))
    stored = StoredWeights(RandomTinySource(spec), BuildOptions(), resolve_target("cpu"))
    assert stored.block(0)["ffn_gate_up_exps.weight"].shape == (3, 64, spec.hidden_size)
