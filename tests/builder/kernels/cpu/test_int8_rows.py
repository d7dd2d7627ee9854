from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.int8_rows import Int8Rows


@pytest.mark.parametrize(
    ("size", "tiles", "whole", "rest"), [(576, 9, 576, 0), (96, 2, 64, 2), (112, 2, 64, 3), (48, 1, 0, 3)]
)
def test_the_last_segment_is_filled_in_part(size: int, tiles: int, whole: int, rest: int) -> None:
    rows = Int8Rows(size)
    assert (rows.tiles, rows.whole, rows.rest) == (tiles, whole, rest)
    assert rows.whole + 16 * rows.rest == size
    assert rows.sixteen_bytes == 1024 * tiles
