"""Weights in the types of their source."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from shortfin_apps.llm.builder.model.spec import BuildOptions
from shortfin_apps.llm.builder.quantise import Bits
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import weight_layout
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.write import plan_weights
from tests.builder.model_files import write_gguf

FOUR, EIGHT = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
# A value projection, which is stacked on q and k, and a matrix of its own: as in files of type Q4_K_M.
OTHERWISE = {"blk.0.attn_v.weight": EIGHT, "blk.1.ffn_down.weight": GGMLQuantizationType.F16}
FINER = ("blk.0.attn_qkv.weight", "blk.1.ffn_down.weight")


def source_of(folder: Path, quantised: GGMLQuantizationType | None = FOUR) -> GgufSource:
    return GgufSource(write_gguf(folder / "tiny.gguf", quantised=quantised, otherwise=OTHERWISE))


def test_a_weight_has_8_bits_if_one_of_its_parts_has_more_than_4(tmp_path: Path) -> None:
    options = with_own_types(source_of(tmp_path), BuildOptions(weights="f32"))
    assert options == BuildOptions(weights="q4", finer_weights=FINER)
    assert options.stored_weights == "q4, 2 of them in q8_0"


@pytest.mark.parametrize(("quantised", "weights"), [(EIGHT, "q8_0"), (None, "bf16")])
def test_other_sources_have_one_type(
    tmp_path: Path, quantised: GGMLQuantizationType | None, weights: str
) -> None:
    options = with_own_types(source_of(tmp_path, quantised), BuildOptions())
    assert (options.weights, options.finer_weights) == (weights, ())


@pytest.mark.parametrize("device", ["cpu:znver4", "cpu:sapphirerapids", "cpu:x86-64-v3", "hip:gfx942"])
def test_each_weight_is_stored_with_its_bits(tmp_path: Path, device: str) -> None:
    source = source_of(tmp_path)
    options = with_own_types(source, BuildOptions(device=device))
    target = resolve_target(device)
    bits: dict[str, Bits | None] = {
        weight.name: weight_layout(weight.name, source.spec, options, target).bits
        for weight in plan_weights(source.spec)
    }
    of_layers = {n: b for n, b in bits.items() if n.startswith("blk.") and not n.endswith("norm.weight")}
    assert {name for name, each in of_layers.items() if each == 8} == set(FINER)
    assert set(of_layers.values()) == {4, 8}
