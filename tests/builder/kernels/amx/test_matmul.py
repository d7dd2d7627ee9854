"""Tiling of K in the AMX matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry, MatmulInt8Geometry
from shortfin_apps.llm.model.weight_blocks import Q8_0


@pytest.mark.parametrize(
    ("k_size", "chunk"), [(576, 18 * 64), (608, 10 * 64), (1536, 16 * 64), (14336, 18 * 64)]
)
def test_bf16_cuts_k_into_near_equal_chunks(k_size: int, chunk: int) -> None:
    g = MatmulFloatTilesGeometry(n=64, k_size=k_size, epilogue="store", is_tiled=False)
    assert g.chunk_bytes == chunk
    assert g.x_stride == g.row_bytes == 2 * k_size
    widened = replace(g, blocks=Q8_0)
    assert 0 < widened.chunk_bytes <= 14 * 64
    assert widened.panel_bytes == g.panel_bytes // 2


@pytest.mark.parametrize(
    ("k_size", "chunks", "chunk_tiles", "finished"), [(576, 1, 9, 4), (1536, 2, 12, 3), (1088, 2, 9, 4)]
)
def test_int8_writes_a_block_out_within_the_last_chunk(
    k_size: int, chunks: int, chunk_tiles: int, finished: int
) -> None:
    g = MatmulInt8Geometry(n=64, k_size=k_size, epilogue="store")
    assert (g.chunks, g.chunk_tiles, g.finished_rows) == (chunks, chunk_tiles, finished)
    last_steps = g.x.tiles - (g.chunks - 1) * g.chunk_tiles
    assert last_steps * g.finished_rows >= 32
