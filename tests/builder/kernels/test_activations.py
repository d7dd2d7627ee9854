"""Layout of activations in memory before a matmul."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.activations import FloatTiles, Int8Blocks, Int8Tiles


@pytest.mark.parametrize("layout", [FloatTiles, Int8Tiles, Int8Blocks])
@pytest.mark.parametrize("features", [32, 96, 576])
def test_sixteen_rows_are_as_large_as_sixteen_times_a_row(
    layout: type[FloatTiles | Int8Tiles | Int8Blocks], features: int
) -> None:
    assert layout(features).tile_row_bytes == 16 * layout(features).row_bytes


def test_the_last_tile_of_bytes_may_be_partly_filled() -> None:
    assert (Int8Tiles(576).tiles, Int8Tiles(577).tiles) == (9, 10)


def test_a_block_holds_quants_scales_shifts_and_sums_of_sixteen_rows() -> None:
    assert (Int8Blocks.scales_at, Int8Blocks.shifts_at) == (512, 576)
    assert (Int8Blocks.sums_at, Int8Blocks.block_bytes) == (768, 960)
    assert Int8Blocks(576).row_bytes == 18 * (32 + 7 * 4)
