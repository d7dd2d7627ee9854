from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.target import Target, resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import block_rows, linear_sizes, weight_layout
from shortfin_apps.llm.builder.weights.layout import (
    BlockRows,
    Fp8Rows,
    Int8Panels,
    QuantisedPanels,
    RowMajor,
)
from shortfin_apps.llm.model.spec import BuildOptions, FloatType, WeightType, weight_shapes
from shortfin_apps.llm.model.weight_blocks import MXFP4, Q4_1, Q8_0, BlockType
from tests.builder.compiled_model import HYBRID, ROUTED, TINY
from tests.builder.specs import changed

NAME = "blk.0.ffn_down.weight"


@pytest.mark.parametrize(
    ("device", "activations", "blocks", "is_in_bf16"),
    [
        ("cuda:sm_90", "bf16", Q4_1, True),
        ("cuda:sm_90", "f16", Q4_1, False),
        ("cuda:sm_90", "f32", Q4_1, False),
        ("cuda:sm_90", "bf16", Q8_0, True),
        ("cuda:sm_90", "bf16", BlockType(8, 16, group=256), True),
        ("cuda:sm_90", "bf16", BlockType(8, has_minima=True, group=256), True),
        ("cuda:sm_90", "f32", Q8_0, False),
        ("hip:gfx942", "bf16", Q8_0, False),
        ("cuda:sm_90", "bf16", BlockType(4, has_minima=True, group=256), True),
        ("cuda:sm_90", "bf16", BlockType(4, 16, has_minima=True, group=256), False),
        ("cuda:sm_90", "bf16", MXFP4, False),
        ("hip:gfx942", "bf16", Q4_1, False),
    ],
)
def test_scales_are_bf16_where_nvidia_gpus_multiply_by_them(
    device: str, activations: FloatType, blocks: BlockType, is_in_bf16: bool
) -> None:
    architecture = "nvptx" if device.startswith("cuda") else "amdgpu"
    target = Target(device, (), architecture, device.split(":")[1], frozenset())
    assert block_rows(blocks, activations, target) == BlockRows(blocks, terms_in_bf16=is_in_bf16)


@pytest.mark.parametrize(("device", "pair"), [("neoverse-v1", 8), ("neoverse-n1", 4), ("znver4", 4)])
@pytest.mark.parametrize("weights", ["q8_0", "q4", "int8"])
def test_bytes_lie_in_eights_where_neon_multiplies_matrices(
    device: str, pair: int, weights: WeightType
) -> None:
    options, target = BuildOptions(weights=weights), resolve_target(f"cpu:{device}")
    layout = weight_layout(NAME, TINY, options, target)
    assert isinstance(layout, QuantisedPanels | Int8Panels)
    assert layout.pair == pair
    # Where matmuls are not of the fused layer.
    layout = weight_layout(NAME, replace(TINY, vocab_size=48), options, target)
    assert isinstance(layout, QuantisedPanels | Int8Panels)
    assert layout.pair < 8


def test_of_a_model_in_fp8_embedding_and_head_stay_floats() -> None:
    options = BuildOptions(device="hip:gfx942", weights="fp8")
    target = resolve_target(options.device)
    layouts = {name: weight_layout(name, TINY, options, target) for name in weight_shapes(TINY)}
    assert layouts["token_embd.weight"] == layouts[TINY.head_weight] == RowMajor("bf16")
    assert layouts["blk.0.attn_norm.weight"] == RowMajor("f32")
    assert layouts["blk.0.ffn_down.weight"] == Fp8Rows("f8E4M3FNUZ")


@pytest.mark.parametrize("device", ["cpu:haswell", "hip:gfx942"])
@pytest.mark.parametrize("weights", ["q8_0", "q4"])
def test_rows_that_are_not_whole_blocks_stay_floats(device: str, weights: WeightType) -> None:
    spec, target = changed(TINY, {"features": 48}), resolve_target(device)
    options = BuildOptions(device=device, weights=weights)
    layouts = {name: weight_layout(name, spec, options, target) for name in weight_shapes(spec)}
    assert layouts["blk.0.ffn_down.weight"].blocks is None
    assert layouts["blk.0.ffn_gate_up.weight"].blocks is not None


def test_the_matrices_of_a_block_have_sizes_if_only_linear_operations_read_them() -> None:
    attention, mlp = TINY.blocks
    assert linear_sizes(attention, 64) == frozenset({64, 128})  # q, k and v
    assert linear_sizes(mlp, 64) == frozenset({64, 128})
    assert linear_sizes(ROUTED.layers[1][-1], 64) is None
    assert linear_sizes(HYBRID.layers[0][0], 64) is None
