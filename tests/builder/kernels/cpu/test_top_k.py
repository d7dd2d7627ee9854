from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.top_k import TopKGeometry


@pytest.mark.parametrize(
    ("size", "lanes", "tile", "tiles", "padded_tiles"),
    [(49152, 16, 224, 220, 224), (272, 16, 16, 17, 32), (1000, 8, 32, 32, 32), (7, 1, 16, 1, 1)],
)
def test_tiles_cover_the_row(size: int, lanes: int, tile: int, tiles: int, padded_tiles: int) -> None:
    geometry = TopKGeometry(size, 4)
    assert (geometry.lanes, geometry.tile) == (lanes, tile)
    assert (geometry.tiles, geometry.padded_tiles) == (tiles, padded_tiles)
