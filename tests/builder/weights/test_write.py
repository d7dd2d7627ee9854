from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import get_args

import iree.runtime as iree
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.builder.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.archive import ArchiveEntry, write_archive
from shortfin_apps.llm.builder.weights.parameters import parameter_types, weight_shapes
from shortfin_apps.llm.builder.weights.write import plan_weights, stored_bytes, write_weights
from shortfin_apps.llm.components.runtime.dtypes import MLIR_DTYPES

TINY = RandomTinySource()


def read_archive(path: Path) -> dict[str, bytes]:
    """Through IREE's own reader."""
    index = iree.ParameterIndex()
    index.load(str(path))
    return {name: bytes(entry.file_view) for name, entry in index.items()}


@settings(max_examples=30, deadline=None)
@given(
    contents=st.dictionaries(st.text(min_size=1, max_size=8), st.binary(min_size=1, max_size=200), min_size=1)
)
def test_iree_reads_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("archive") / "x.irpa"
    entries = [ArchiveEntry(name, len(content)) for name, content in contents.items()]
    write_archive(path, entries, contents.values())
    assert read_archive(path) == contents


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_the_graph_reads(tied: bool) -> None:
    spec = replace(TINY.spec, tie_word_embeddings=tied)
    # in one order, too: the archive's entries come from the one, their contents from the other
    assert [(w.name, w.shape) for w in plan_weights(spec)] == list(weight_shapes(spec).items())


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


def test_parts_are_stacked(tmp_path: Path) -> None:
    path = tmp_path / "model.irpa"
    options = BuildOptions(weights="f32", device="hip:gfx942")  # a GPU takes matrices as they are
    write_weights(TINY, options, resolve_target(options.device), path, lambda _: None)
    found = read_archive(path)
    parts = [TINY.tensor(f"blk.1.{name}.weight") for name in ("attn_q", "attn_k", "attn_v")]
    assert found["blk.1.attn_qkv.weight"] == np.concatenate(parts).tobytes()
    assert found["blk.0.attn_norm.weight"] == TINY.tensor("blk.0.attn_norm.weight").tobytes()
    assert "blk.1.attn_q.weight" not in found


def test_one_parameter_is_held_at_a_time(tmp_path: Path) -> None:
    """The archive takes the contents as a stream: each is written before the next is made."""
    path = tmp_path / "x.irpa"
    sizes: list[int] = []

    def contents() -> Iterator[bytes]:
        for _ in range(3):
            yield bytes(1 << 20)
            sizes.append(path.stat().st_size)

    write_archive(path, [ArchiveEntry(str(i), 1 << 20) for i in range(3)], contents())
    assert sizes[0] >= 1 << 20
    assert sizes == sorted(sizes)
