from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.int8 import QuantiseRowsGeometry, RowQuantisation


@pytest.mark.parametrize(("size", "whole", "rest"), [(576, 576, 0), (96, 64, 2), (112, 64, 3), (48, 0, 3)])
def test_the_last_segment_is_filled_in_part(size: int, whole: int, rest: int) -> None:
    rows = RowQuantisation(size=size, dtype="f32", eps=None)
    assert (rows.whole, rows.rest) == (whole, rest)
    assert rows.whole + 16 * rows.rest == size
    assert rows.tiles.tiles == -(-size // 64)


@pytest.mark.parametrize(("is_tiled", "offsets"), [(False, [0, 16, 32, 48]), (True, [0, 16, 512, 528])])
def test_a_segment_is_two_tiles_of_bf16(is_tiled: bool, offsets: list[int]) -> None:
    rows = RowQuantisation(size=576, dtype="bf16", eps=None, is_tiled=is_tiled)
    assert rows.part_offsets == offsets


@pytest.mark.parametrize(
    ("size", "dtype", "eps", "measures_bf16"),
    [
        (576, "bf16", None, True),
        (48, "bf16", None, False),
        (576, "f32", None, False),
        (576, "bf16", 1e-5, False),
    ],
)
def test_bf16_is_measured_by_cache_lines(
    size: int, dtype: str, eps: float | None, measures_bf16: bool
) -> None:
    assert RowQuantisation(size=size, dtype=dtype, eps=eps).measures_bf16 == measures_bf16


def test_workgroups_share_no_segment_of_a_tile() -> None:
    assert 16 % QuantiseRowsGeometry(576, "bf16", None).row_block == 0


@pytest.mark.parametrize(("eps", "reads"), [(None, ["x"]), (1e-5, ["x", "norm"])])
def test_a_norm_brings_its_weights(eps: float | None, reads: list[str]) -> None:
    assert list(QuantiseRowsGeometry(576, "f32", eps).interface.reads) == reads
