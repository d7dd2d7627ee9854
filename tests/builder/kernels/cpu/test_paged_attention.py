from __future__ import annotations

from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.kernels.cpu.paged_attention import PagedAttentionGeometry

SMOLLM2 = PagedAttentionGeometry(
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    stride=16,
    page_elements=2 * 30 * 16 * 3 * 64,
    kv_dtype="bf16",
    dtype="bf16",
    has_wide_vectors=True,
)
LLAMA3 = replace(SMOLLM2, q_heads=32, kv_heads=8, head_dim=128)
LATENT = replace(SMOLLM2, q_heads=8, kv_heads=1, head_dim=576)  # a group of heads of DeepSeek-V2-Lite


@pytest.mark.parametrize(
    ("geometry", "tokens", "score_pages", "dim_tiles"),
    [
        (SMOLLM2, [1, 4], [4, 2], [64, 32]),
        (replace(SMOLLM2, has_wide_vectors=False), [1], [2], [32]),
        (LLAMA3, [1, 2], [4, 3], [64, 32]),
        (LATENT, [1], [3], [32]),
        (replace(SMOLLM2, q_heads=3, head_dim=96), [1, 8], [4, 3], [32, 32]),
        (replace(SMOLLM2, q_heads=60), [1], [1], [16]),
        (replace(SMOLLM2, stride=2), [1, 2], [4, 4], [64, 64]),
    ],
)
def test_accumulators_of_a_tile_fit_the_registers(
    geometry: PagedAttentionGeometry, tokens: list[int], score_pages: list[int], dim_tiles: list[int]
) -> None:
    tiles = geometry.tiles
    assert [tile.tokens for tile in tiles] == tokens
    assert [tile.score_pages for tile in tiles] == score_pages
    assert [tile.dim_tile for tile in tiles] == dim_tiles
    assert [page for pages in tiles[-1].score_rounds for page in pages] == list(range(tiles[0].step_pages))
    assert geometry.stride % geometry.tile_tokens == 0
    registers = 24 if geometry.has_wide_vectors else 8
    for tile in tiles:
        assert tile.queries * max(tile.score_pages, tile.dim_tile // 16) <= max(registers, tile.queries)
        assert geometry.head_dim % tile.dim_tile == 0
        assert tile.dim_tile.bit_count() == 1  # LLVM takes other vectors apart


def test_a_page_holds_k_and_v_of_every_layer() -> None:
    assert SMOLLM2.layer_elements * 30 == SMOLLM2.page_elements
    assert SMOLLM2.plane_elements == 3 * 64 * 16
    assert SMOLLM2.cache.type == "memref<?x184320xbf16>"


def test_the_scales_of_a_head_in_bytes_follow_its_elements() -> None:
    geometry = replace(SMOLLM2, kv_dtype="i8", page_elements=2 * 30 * 16 * 208)
    assert (geometry.head_values, geometry.head_elements) == (64 * 16, 64 * 16 + 4 * 16)
    assert 30 * geometry.layer_elements <= geometry.page_elements
    assert geometry.cache.type == "memref<?x199680xi8>"


@pytest.mark.parametrize(("kv_dtype", "elements"), [("bf16", 32), ("f16", 32), ("f32", 16), ("i8", 64)])
def test_prefetches_step_by_cache_lines(kv_dtype: str, elements: int) -> None:
    geometry = replace(SMOLLM2, kv_dtype=kv_dtype)
    assert geometry.line_elements == elements
    assert [tile.prefetches for tile in geometry.tiles] == [True, False]
