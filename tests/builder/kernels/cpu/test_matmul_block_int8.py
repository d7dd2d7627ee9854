from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from shortfin_apps.llm.builder.blocks import Q4_1, Q8_0, BlockType
from shortfin_apps.llm.builder.kernels.cpu.matmul_block_int8 import VectorBlockInt8Geometry
from shortfin_apps.llm.builder.weights.layout import QuantisedPanels
from tests.builder.random_blocks import BLOCK_TYPES

STORE = VectorBlockInt8Geometry(n=960, k_size=768, epilogue="store", blocks=Q4_1)


@pytest.mark.parametrize("kind", [each for each in BLOCK_TYPES if not each.is_e2m1], ids=str)
def test_panels_are_read_as_they_are_stored(kind: BlockType) -> None:
    geometry = replace(STORE, blocks=kind)
    stored = QuantisedPanels(kind, 4, gated=False).stored("w", (960, 768))
    reads = geometry.interface.reads
    assert prod(stored["w"][0]) == prod(size for size in reads["w"].shape if isinstance(size, int))
    assert stored["w.scales"] == (reads["w_scales"].shape, reads["w_scales"].dtype)


@pytest.mark.parametrize(("k_size", "rows"), [(576, 256), (4096, 32), (65536, 32)])
def test_a_workgroups_rows_stay_in_the_second_level_cache(k_size: int, rows: int) -> None:
    assert replace(STORE, k_size=k_size).grid.row_block == rows


@pytest.mark.parametrize("n", [64, 1536, 3072, 17408])
def test_a_workgroup_makes_whole_blocks_of_what_is_gated(n: int) -> None:
    geometry = replace(STORE, n=n, epilogue="silu")
    assert geometry.grid.panels_per_group % 2 == 0
    assert list(geometry.interface.writes) == ["out", "quantised"]
    assert list(STORE.interface.writes) == ["out"]


def test_weights_lose_their_sign_only_where_an_instruction_wants_that() -> None:
    bytes_of = replace(STORE, blocks=Q8_0)
    assert bytes_of.is_shifted
    assert not replace(bytes_of, has_dot=False).is_shifted
    assert not STORE.is_shifted


def test_narrow_vectors_take_fewer_rows() -> None:
    assert STORE.grid.tile_rows == 8
    assert replace(STORE, has_wide_vectors=False).grid.tile_rows == 2


def test_tiles_do_not_cross_the_sixteens_in_which_rows_are_interleaved() -> None:
    assert 16 % STORE.grid.tile_rows == 0
    assert STORE.grid.row_block % 16 == 0
