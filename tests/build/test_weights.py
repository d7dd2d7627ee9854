from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import iree.runtime as iree
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.build.graph_weights import parameter_types
from shortfin_apps.llm.build.sources.base import Array
from shortfin_apps.llm.build.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.build.spec import BuildOptions, WeightType
from shortfin_apps.llm.build.weights import WEIGHT_DTYPES, Parameter, plan_parameters, write_weights
from shortfin_apps.llm.build.weights_archive import ArchiveEntry, write_archive

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


@pytest.mark.parametrize("weights", get_args(WeightType))
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_the_graph_reads(weights: WeightType, tied: bool) -> None:
    spec = replace(TINY.spec, tie_word_embeddings=tied)
    names = {np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
    ours = {p.name: (p.shape, names[p.dtype]) for p in plan_parameters(spec, weights)}
    assert ours == parameter_types(spec, BuildOptions(weights=weights))


@pytest.mark.parametrize("weights", get_args(WeightType))
def test_weights_are_fused_and_cast(tmp_path: Path, weights: WeightType) -> None:
    path = tmp_path / "model.irpa"
    told: list[int] = []
    write_weights(TINY, weights, path, told.append)
    found = read_archive(path)
    assert sum(told) == sum(map(len, found.values()))
    parts = [TINY.tensor(f"blk.1.{name}.weight") for name in ("attn_q", "attn_k", "attn_v")]
    assert found["blk.1.attn_qkv.weight"] == np.concatenate(parts).astype(WEIGHT_DTYPES[weights]).tobytes()
    assert found["blk.0.attn_norm.weight"] == TINY.tensor("blk.0.attn_norm.weight").tobytes()
    assert "blk.1.attn_q.weight" not in found


def test_f16_saturates() -> None:
    class Large(RandomTinySource):
        def tensor(self, name: str) -> Array:
            return np.array([1e6, -1e6, 1.0], np.float32)

    value = Parameter("x", (3,), np.dtype(np.float16), ("x",)).load(Large())
    assert value.tolist() == [65504.0, -65504.0, 1.0]


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
