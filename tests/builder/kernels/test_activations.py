"""Layout of activations in memory before a matmul."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.activations import FloatTiles, Int8Tiles, QuantBlocks


@pytest.mark.parametrize("features", [32, 96, 576])
def test_sixteen_rows_are_as_large_as_sixteen_times_a_row(features: int) -> None:
    layouts = FloatTiles(features), Int8Tiles(features), QuantBlocks(features, 8), QuantBlocks(features, 12)
    for layout in layouts:
        assert layout.tile_row_bytes == 16 * layout.row_bytes


def test_the_last_tile_of_bytes_may_be_partly_filled() -> None:
    assert (Int8Tiles(576).tiles, Int8Tiles(577).tiles) == (9, 10)


def test_a_block_holds_quants_scales_shifts_and_sums_of_sixteen_rows() -> None:
    eight, twelve = QuantBlocks(576, 8), QuantBlocks(576, 12)
    assert (eight.scales_at, eight.shifts_at, eight.sums_at, eight.block_bytes) == (512, 576, 768, 960)
    assert (twelve.scales_at, twelve.shifts_at, twelve.sums_at, twelve.block_bytes) == (
        1024,
        1088,
        1280,
        1472,
    )
    assert eight.row_bytes == 18 * (32 + 7 * 4)
    assert twelve.row_bytes == 18 * (64 + 7 * 4)


def test_the_digits_of_the_largest_quant_are_signed_bytes_with_signed_negatives() -> None:
    for quant in (-QuantBlocks(32, 12).most, QuantBlocks(32, 12).most):
        first = (quant + 8) >> 4
        assert abs(first) == 127
        assert -8 <= quant - 16 * first <= 7
