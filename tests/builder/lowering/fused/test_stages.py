"""The stages that a layer becomes, by the operands that its weights are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shortfin_apps.llm.builder.graph.emitter import Tensor
from shortfin_apps.llm.builder.lowering.fused.stage_kernels import StageKernels
from shortfin_apps.llm.builder.lowering.fused.stages import (
    MatmulStage,
    StageList,
    buffer_row_bytes,
    inputs_of,
)
from shortfin_apps.llm.builder.lowering.lowering import Values
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.operations import Linear, Operation
from shortfin_apps.llm.model.spec import ActivationBits, BuildOptions, WeightType
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed

SPEC = changed(TINY, {"head_dim": 32})
LAYER = slice(4, 10)  # from the first attention's result to the next layer's q, k and v
Q8 = ["attended_blocks", "sum", "normed_blocks", "gated", "new_x", "normed_blocks", "qkv"]
INT8 = [name.replace("blocks", "int8") for name in Q8]
BF16 = ["sum", "normed", "gated", "new_x", "normed", "qkv"]


def stages(weights: WeightType, part: slice = LAYER, bits: ActivationBits = 12) -> StageList:
    run = list(SPEC.operations())[part]
    reads = inputs_of(run)
    target = resolve_target("cpu:sapphirerapids")
    types = WeightTypes(SPEC, BuildOptions(weights=weights), target)
    values = Values({name: Tensor(f"%{name}", (1,), "f32") for name in reads})
    kernels = StageKernels(SPEC, types, "bf16", bits, target)
    return StageList(run, reads, values, types, kernels.operands_of, None)


@pytest.mark.parametrize(
    ("weights", "bits", "expected"),
    [
        ("bf16", 12, BF16),
        ("q8_0", 12, Q8),
        ("q4", 8, Q8),
        ("q4", 16, BF16),
        ("int8", 12, [*INT8[:4], "gated_int8", *INT8[4:]]),
    ],
)
def test_values_are_quantised_for_the_weights_that_multiply_them(
    weights: WeightType, bits: ActivationBits, expected: list[str]
) -> None:
    assert [stage.out for stage in stages(weights, bits=bits)] == expected


def test_a_value_that_the_run_was_given_is_written_to_a_new_buffer() -> None:
    layer = stages("bf16")
    assert (layer.buffer("x"), layer.features["x"]) == ("new_x", SPEC.hidden_size)
    residuals = [stage.residual for stage in layer if isinstance(stage, MatmulStage)]
    assert residuals == ["x", None, "sum", None]


def test_a_gate_over_blocks_leaves_its_result_quantised_for_the_next() -> None:
    _, _, _, gate, down, *_ = stages("q4")
    assert isinstance(gate, MatmulStage)
    assert isinstance(down, MatmulStage)
    assert gate.quantised == down.x == "gated_blocks"
    assert down.x_kept


@dataclass(frozen=True, slots=True)
class Another(Operation):
    """An operation that the fused layer does not know."""


def test_the_operand_of_a_matmul_has_a_buffer_whatever_computes_it() -> None:
    types = WeightTypes(SPEC, BuildOptions(weights="int8"), resolve_target("cpu:znver4"))
    down = Linear("made", "out", "blk.0.ffn_down.weight")
    sizes = buffer_row_bytes([Another("x", "made"), down], types, 4, 8)
    assert (sizes["out"], sizes["made"], sizes["made_int8"]) == (4 * 64, 4 * 128, 128)
    assert list(sizes) == ["out", "made", "made_blocks", "made_int8", "made_int8.scales"]


def test_a_buffer_has_room_for_the_layer_with_the_largest_value() -> None:
    spec = changed(SPEC, layers=3, at={0: {"features": 96}, 2: {"features": 64}})
    types = WeightTypes(spec, BuildOptions(weights="int8"), resolve_target("cpu:znver4"))
    sizes = buffer_row_bytes(list(spec.operations()), types, 2, 8)
    assert sizes["gated"] == 2 * 128
