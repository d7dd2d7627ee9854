"""Norm and quantisation stages."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.fused.stages import (
    QuantiseBlocksGeometry,
    RmsNormGeometry,
)

NORM = RmsNormGeometry(576, 1e-5)


@pytest.mark.parametrize(("size", "accumulators"), [(576, 4), (352, 2)])
def test_accumulators_fill_a_row(size: int, accumulators: int) -> None:
    assert RmsNormGeometry(size, 1e-5).accumulators == accumulators
    assert size % (16 * accumulators) == 0


def test_rows_that_are_normed_first_are_f32() -> None:
    assert QuantiseBlocksGeometry(576, 8, False, NORM).x_row_bytes == NORM.x_row_bytes == 4 * 576
    assert QuantiseBlocksGeometry(576, 8, False).x_row_bytes == 2 * 576


def test_blocks_of_a_row_are_a_tile_apart_where_rows_are_in_tiles() -> None:
    assert QuantiseBlocksGeometry(576, 8, False, NORM).x_block_bytes == 4 * 32
    assert QuantiseBlocksGeometry(576, 8, False).x_block_bytes == 2 * 32
    assert QuantiseBlocksGeometry(576, 8, True).x_block_bytes == 1024
