"""Weights in the types of their source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import Q4_1, BlockType
from tests.builder.gguf_data import write_random_gguf
from tests.builder.model_files import write_gguf

FOUR, EIGHT = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
# A value projection, which is stacked on q and k, and a matrix of its own: as in files of type Q4_K_M.
OTHERWISE = {"blk.0.attn_v.weight": EIGHT, "blk.1.ffn_down.weight": GGMLQuantizationType.F16}
KEPT = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_1", "Q8_0", "IQ4_XS", "IQ4_NL"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
FINER = ("blk.0.attn_qkv.weight", "blk.1.ffn_down.weight")


def source_of(folder: Path, quantised: GGMLQuantizationType | None = FOUR) -> GgufSource:
    return GgufSource(write_gguf(folder / "tiny.gguf", quantised=quantised, otherwise=OTHERWISE))


def test_a_weight_has_8_bits_if_one_of_its_parts_has_more_than_4(tmp_path: Path) -> None:
    options = with_own_types(source_of(tmp_path), BuildOptions(weights="f32"))
    kept = BlockType(8, has_minima=True)  # which has room for four bits and a minimum
    types: dict[str, BlockType | None] = {
        "token_embd.weight": kept,
        FINER[0]: kept,
        FINER[1]: None,
        "output.weight": Q4_1,
    }
    assert options == BuildOptions(weights="q4", block_types=tuple(types.items()))
    assert options.stored_weights == "q4, 4 of them in the source's own types"


@pytest.mark.parametrize(("quantised", "weights"), [(EIGHT, "q8_0"), (None, "bf16")])
def test_other_sources_have_one_type(
    tmp_path: Path, quantised: GGMLQuantizationType | None, weights: str
) -> None:
    options = with_own_types(source_of(tmp_path, quantised), BuildOptions())
    floats = ((FINER[1], None),) if quantised else ()
    assert (options.weights, options.block_types) == (weights, floats)


@pytest.mark.parametrize("device", ["cpu:znver4", "cpu:sapphirerapids", "cpu:x86-64-v3", "hip:gfx942"])
def test_each_weight_is_stored_with_its_bits(tmp_path: Path, device: str) -> None:
    source = source_of(tmp_path)
    options = with_own_types(source, BuildOptions(device=device))
    target = resolve_target(device)
    blocks = {
        weight.name: weight_layout(weight.name, source.spec, options, target).blocks
        for weight in plan_weights(source.spec)
    }
    assert blocks[FINER[1]] is None
    of_layers = {name: kind.bits for name, kind in blocks.items() if kind and name.startswith("blk.")}
    assert {name for name, each in of_layers.items() if each == 8} == {FINER[0]}
    assert set(of_layers.values()) == {4, 8}


@pytest.mark.parametrize("device", ["cpu:znver4", "hip:gfx942"])
@pytest.mark.parametrize("name", KEPT)
def test_every_weight_is_what_the_file_has(tmp_path: Path, name: str, device: str) -> None:
    """Beside tensors of Q6_K and Q8_0, which are stacked on them."""
    otherwise = {"blk.0.attn_v.weight": GGMLQuantizationType.Q6_K, "blk.1.attn_v.weight": EIGHT}
    path = write_random_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[name], otherwise)
    source = GgufSource(path)
    options = with_own_types(source, BuildOptions(device=device))
    target = resolve_target(device)
    for weight in plan_weights(source.spec):
        kind = weight_layout(weight.name, source.spec, options, target).blocks
        if kind is not None:
            kept = weight.load_blocks(source, kind).dequantise()
            np.testing.assert_array_equal(kept, weight.load(source))
