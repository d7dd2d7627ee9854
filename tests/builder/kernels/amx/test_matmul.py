"""Tiling of rows, columns and K in the AMX matmuls."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from shortfin_apps.llm.builder.blocks import BLOCK, Q4_1, Q8_0, BlockType
from shortfin_apps.llm.builder.kernels.amx.matmul import (
    MatmulBf16Geometry,
    MatmulBlockInt8Geometry,
    MatmulGeometry,
    MatmulInt8Geometry,
)
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue, is_gated
from shortfin_apps.llm.builder.weights.layout import QuantisedPanels
from tests.builder.random_blocks import BLOCK_TYPES

STACK_BYTES = 96 << 10  # of 128 KiB, which a worker of the runtime has
SIZES = [(960, 576), (352, 352), (1152, 1056), (28672, 4096), (4096, 14336)]
EPILOGUES: list[Epilogue] = ["store", "residual", "silu", "gelu"]


def bf16(**sizes: Any) -> MatmulGeometry:
    return MatmulBf16Geometry(**sizes, is_tiled=True)


def q8_0(**sizes: Any) -> MatmulGeometry:
    return MatmulBlockInt8Geometry(**sizes, blocks=Q8_0)


def q4(**sizes: Any) -> MatmulGeometry:
    return MatmulBlockInt8Geometry(**sizes, blocks=Q4_1)


KINDS = [bf16, q8_0, q4, MatmulInt8Geometry]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("n", "k_size"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_cut_into_whole_parts(kind: Any, n: int, k_size: int, epilogue: Epilogue) -> None:
    g = kind(n=n, k_size=k_size, epilogue=epilogue)
    assert g.row_block % 32 == 0
    assert 32 <= g.row_block <= 512
    assert (g.column_groups - 1) * g.panels_per_item < g.panels <= g.column_groups * g.panels_per_item
    assert g.panel_out_bytes * g.panels == g.out_row_bytes
    assert all(offset % 64 == 0 for offset in g.local.offsets.values())
    assert g.local.bytes < STACK_BYTES
    if is_gated(epilogue):
        assert g.panels_per_item % 2 == 0


@pytest.mark.parametrize(
    ("k_size", "chunk"), [(576, 18 * 64), (608, 10 * 64), (1536, 16 * 64), (14336, 18 * 64)]
)
def test_bf16_cuts_k_into_near_equal_chunks(k_size: int, chunk: int) -> None:
    g = MatmulBf16Geometry(n=64, k_size=k_size, epilogue="store", is_tiled=False)
    assert g.chunk_bytes == chunk
    assert g.x_stride == g.row_bytes == 2 * k_size


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


@pytest.mark.parametrize(("k_size", "chunk_blocks"), [(576, 18), (1536, 16), (32, 2), (352, 10), (14336, 20)])
def test_blocks_are_cut_into_even_chunks(k_size: int, chunk_blocks: int) -> None:
    g = MatmulBlockInt8Geometry(n=64, k_size=k_size, epilogue="store", blocks=Q4_1)
    assert g.chunk_blocks == chunk_blocks
    assert g.x.blocks - g.paired_blocks == k_size // 32 % 2
    assert g.panel_bytes == g.x.blocks * g.block_bytes
    assert (g.block_bytes, g.terms_bytes) == (512, 128)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=str)
def test_blocks_have_the_bytes_of_their_layout(kind: BlockType) -> None:
    g = MatmulBlockInt8Geometry(n=64, k_size=768, epilogue="store", blocks=kind)
    quants, terms = QuantisedPanels(kind, 4, False).stored("w", (64, 768)).values()
    assert prod(quants[0]) == 2 * g.panel_bytes
    assert prod(terms[0]) * (2 if terms[1] == "f16" else 1) == 2 * g.panel_terms_bytes
    assert g.panel_terms_bytes // g.x.blocks == g.terms_bytes
    assert g.parts * kind.size == BLOCK


def test_parts_of_a_block_have_shifts_and_sums_of_their_own() -> None:
    whole = MatmulBlockInt8Geometry(n=64, k_size=64, epilogue="store", blocks=Q8_0)
    halves = MatmulBlockInt8Geometry(n=64, k_size=64, epilogue="store", blocks=BlockType(8, 16, group=32))
    stats = [g.shift_past(part) for g in (whole, halves) for part in range(g.parts)]
    stats += [g.sum_past(part) for g in (whole, halves) for part in range(g.parts)]
    assert stats == [64 * nth for nth in range(1, 7)]
    assert whole.x.scales_at + 64 * 7 == whole.x.block_bytes
