from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import MatmulGrid


@pytest.mark.parametrize(("panels", "per_group", "groups"), [(96, 3, 32), (97, 3, 33), (2, 1, 2), (1, 1, 1)])
def test_groups_cover_the_panels(panels: int, per_group: int, groups: int) -> None:
    assert MatmulGrid(panels, per_group, row_block=128, tile_rows=8).column_groups == groups


@pytest.mark.parametrize(("tile_rows", "tails"), [(8, (4, 2, 1)), (2, (1,)), (1, ())])
def test_tails_take_any_number_of_rows_left_over(tile_rows: int, tails: tuple[int, ...]) -> None:
    grid = MatmulGrid(1, 1, row_block=128, tile_rows=tile_rows)
    assert grid.tail_sizes == tails
    assert sum(tails) == tile_rows - 1
