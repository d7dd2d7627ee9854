"""Tiling of rows, columns and K in the fused layer's matmuls, and the layout of weights in blocks."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue, is_gated
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBlocksGeometry, MatmulGeometry
from shortfin_apps.llm.builder.weights.layout import QuantisedPanels
from shortfin_apps.llm.model.weight_blocks import BLOCK, Q4_1, Q8_0, BlockType
from tests.builder.random_blocks import BLOCK_TYPES

STACK_BYTES = 96 << 10  # of 128 KiB, which a worker of the runtime has
SIZES = [(960, 576), (352, 352), (1152, 1056), (28672, 4096), (4096, 14336)]
EPILOGUES: list[Epilogue] = ["store", "residual", "silu", "gelu"]


def bf16(**sizes: Any) -> MatmulGeometry:
    return MatmulFloatTilesGeometry(**sizes, is_tiled=True)


def widened(**sizes: Any) -> MatmulGeometry:
    return MatmulFloatTilesGeometry(**sizes, is_tiled=True, blocks=Q4_1)


def q8_0(**sizes: Any) -> MatmulGeometry:
    return MatmulBlocksGeometry(**sizes, blocks=Q8_0, x_bits=8)


def q4(**sizes: Any) -> MatmulGeometry:
    return MatmulBlocksGeometry(**sizes, blocks=Q4_1, x_bits=8)


def q4_by_12_bits(**sizes: Any) -> MatmulGeometry:
    return MatmulBlocksGeometry(**sizes, blocks=Q4_1, x_bits=12)


KINDS = [bf16, widened, q8_0, q4, q4_by_12_bits, MatmulInt8Geometry]


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


@pytest.mark.parametrize(("k_size", "chunk_blocks"), [(576, 18), (1536, 16), (32, 2), (352, 10), (14336, 20)])
def test_blocks_are_cut_into_even_chunks(k_size: int, chunk_blocks: int) -> None:
    g = MatmulBlocksGeometry(n=64, k_size=k_size, epilogue="store", blocks=Q4_1, x_bits=8)
    assert g.chunk_blocks == chunk_blocks
    assert replace(g, x_bits=12).chunk_blocks <= 10
    assert g.x.blocks - g.paired_blocks == k_size // 32 % 2
    assert g.panel_bytes == g.x.blocks * g.w.block_bytes
    assert (g.w.block_bytes, g.w.terms_bytes) == (512, 128)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=str)
def test_blocks_have_the_bytes_of_their_layout(kind: BlockType) -> None:
    g = MatmulBlocksGeometry(n=64, k_size=768, epilogue="store", blocks=kind, x_bits=8)
    quants, terms = QuantisedPanels(kind, 4, False).stored("w", (64, 768)).values()
    assert prod(quants[0]) == 2 * g.panel_bytes
    assert prod(terms[0]) * (2 if terms[1] == "f16" else 1) == 2 * g.w.panel_terms_bytes
    assert g.w.panel_terms_bytes // g.x.blocks == g.w.terms_bytes
    assert g.w.parts * kind.size == BLOCK


def test_parts_of_a_block_have_shifts_and_sums_of_their_own() -> None:
    whole = MatmulBlocksGeometry(n=64, k_size=64, epilogue="store", blocks=Q8_0, x_bits=8)
    halves = MatmulBlocksGeometry(
        n=64, k_size=64, epilogue="store", blocks=BlockType(8, 16, group=32), x_bits=8
    )
    stats = [g.shift_past(part) for g in (whole, halves) for part in range(g.w.parts)]
    stats += [g.sum_past(part) for g in (whole, halves) for part in range(g.w.parts)]
    assert stats == [64 * nth for nth in range(1, 7)]
    assert whole.x.scales_at + 64 * 7 == whole.x.block_bytes


def test_weights_lose_their_sign_only_where_an_instruction_wants_that() -> None:
    of_bytes = MatmulBlocksGeometry(n=64, k_size=64, epilogue="store", blocks=Q8_0, x_bits=8)
    assert of_bytes.is_shifted
    assert not replace(of_bytes, has_dot=False).is_shifted
    assert not replace(of_bytes, has_wide_vectors=False, has_neon=True).is_shifted
    assert not replace(of_bytes, blocks=Q4_1).is_shifted


@pytest.mark.parametrize("pair", [4, 8])
def test_neon_multiplies_matrices_of_weights_in_eights(pair: int) -> None:
    g = MatmulBlocksGeometry(n=64, k_size=64, epilogue="store", blocks=Q8_0, x_bits=8, pair=pair)
    assert g.has_smmla == (pair == 8)


@pytest.mark.parametrize(("is_wide", "rows"), [(True, 8), (False, 2)])
def test_rows_of_blocks_taken_together_are_of_one_sixteen(is_wide: bool, rows: int) -> None:
    g = MatmulBlocksGeometry(
        n=64, k_size=64, epilogue="store", blocks=Q8_0, x_bits=8, has_wide_vectors=is_wide
    )
    assert g.tile_rows == rows
    assert 16 % g.tile_rows == 0
