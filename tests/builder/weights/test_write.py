from __future__ import annotations

from math import prod
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import BlockRows, stored_types
from shortfin_apps.llm.builder.weights.parameters import parameter_types
from shortfin_apps.llm.builder.weights.write import plan_weights, stored_bytes, write_weights
from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from tests.builder.golden_families import GoldenFamily
from tests.builder.model_files import write_gguf
from tests.contract.test_irpa import read_archive

TINY = RandomTinySource()


@pytest.mark.parametrize("device", ["cpu", "cpu:haswell", "hip:gfx942"])
@pytest.mark.parametrize("weights", get_args(WeightType))
def test_the_archive_holds_the_parameters_that_the_program_reads(
    tmp_path: Path, weights: WeightType, device: str
) -> None:
    options, target = BuildOptions(weights=weights, device=device), resolve_target(device)
    path = tmp_path / "model.irpa"
    told: list[int] = []
    write_weights(TINY, options, target, path, told.append)
    found = read_archive(path)
    read = parameter_types(TINY.spec, options, target)
    assert {name: len(content) for name, content in found.items()} == {
        name: prod(shape) * MLIR_DTYPES[dtype].itemsize for name, (shape, dtype) in read.items()
    }
    assert sum(told) == sum(map(len, found.values())) == stored_bytes(TINY.spec, options, target)


@pytest.mark.parametrize(("kind", "weights"), [("Q8_0", "q8_0"), ("Q4_0", "q4"), ("Q4_1", "q4")])
def test_a_gpu_keeps_the_blocks_of_a_gguf_file(tmp_path: Path, kind: str, weights: WeightType) -> None:
    write_gguf(tmp_path / "tiny.gguf", quantised=GGMLQuantizationType[kind])
    source = GgufSource(tmp_path / "tiny.gguf")
    options = BuildOptions(weights=weights, device="hip:gfx942")
    write_weights(source, options, resolve_target(options.device), tmp_path / "model.irpa", lambda _: None)
    found = read_archive(tmp_path / "model.irpa")
    name = "blk.1.ffn_down.weight"
    blocks = source.blocks(name)
    assert blocks is not None
    stored = BlockRows(blocks.type)
    names = stored.stored(name, blocks.quants.shape)
    kept = dict(zip(names, stored.store(blocks), strict=True))
    assert {each: found[each] for each in names} == {each: value.tobytes() for each, value in kept.items()}


@pytest.mark.parametrize("device", ["cpu:haswell", "cpu:sapphirerapids", "hip:gfx942"])
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8_0", "q4"])
def test_the_matrices_of_experts_lie_one_behind_another(
    tmp_path: Path, weights: WeightType, device: str
) -> None:
    source = HfDirectorySource(GoldenFamily.of("qwen3-moe").write_hf(tmp_path))
    options, target = BuildOptions(weights=weights, device=device), resolve_target(device)
    name = "blk.1.ffn_down_exps.weight"
    [weight] = [each for each in plan_weights(source.spec) if each.name == name]
    layout = weight_layout(name, source.spec, options, target)
    parts = [layout.store(source.tensor(part).astype(np.float32)) for part in weight.parts]
    expected = [np.concatenate(each) for each in zip(*parts, strict=True)]
    stored = [value.tobytes() for value in weight.stored(source, layout)]
    assert b"".join(stored) == b"".join(value.tobytes() for value in expected)
    types = stored_types(layout, name, weight.shape).values()
    assert [shape for shape, _ in types] == [value.shape for value in expected]
    if layout.blocks is None:  # blocks would cut other weights of so small a model
        write_weights(source, options, target, tmp_path / "model.irpa", lambda _: None)
        assert read_archive(tmp_path / "model.irpa")[name] == b"".join(stored)


def test_parts_are_stacked(tmp_path: Path) -> None:
    path = tmp_path / "model.irpa"
    options = BuildOptions(weights="f32", device="hip:gfx942")  # a GPU takes matrices as they are
    write_weights(TINY, options, resolve_target(options.device), path, lambda _: None)
    found = read_archive(path)
    parts = [TINY.tensor(f"blk.1.{name}.weight") for name in ("attn_q", "attn_k", "attn_v")]
    assert found["blk.1.attn_qkv.weight"] == np.concatenate(parts).tobytes()
    assert found["blk.0.attn_norm.weight"] == TINY.tensor("blk.0.attn_norm.weight").tobytes()
    assert "blk.1.attn_q.weight" not in found
