"""Tiling of heads, slots and pages in attention."""

from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.builder.kernels.avx512.attention import (
    DecodeAttentionGeometry,
    PagedAttentionGeometry,
    widened_slots,
)

STACK_BYTES = 96 << 10  # of 128 KiB, which a worker of the runtime has
SMOLLM2 = {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "stride": 16}
LLAMA = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "stride": 16}
GEMMA = {"q_heads": 4, "kv_heads": 1, "head_dim": 256, "stride": 16, "window": 512}
WIDE = {"q_heads": 8, "kv_heads": 1, "head_dim": 192, "stride": 32}


def attention(shape: Any, **sizes: Any) -> PagedAttentionGeometry:
    return PagedAttentionGeometry(**shape, page_elements=0, step_slots=64, **sizes)


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA, WIDE])
def test_tiles_fill_a_page(shape: Any) -> None:
    g = attention(shape, tile_tokens=8)
    assert g.dim_tiles * g.slot_tiles * 1024 == g.head_bytes
    assert g.out_tiles * g.v_tiles * g.v_tile_bytes == g.head_bytes
    assert g.out_tiles % g.accumulators == 0
    assert g.layer_bytes == 2 * g.kv_heads * g.stride * g.head_dim * 2
    assert all(offset % 64 == 0 for offset in g.local.offsets.values())


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA, WIDE])
@pytest.mark.parametrize("quarters", [1, 2])
def test_rounds_of_a_step_prefetch_no_more_than_there_is(shape: Any, quarters: int) -> None:
    g = attention(shape, tile_tokens=1)
    assert g.round_lines(quarters) * 64 * g.step_pages <= quarters * g.kv_bytes // 4
    assert g.round_lines(quarters) > 0


@pytest.mark.parametrize(
    ("shape", "tokens", "query_tiles"),
    [(SMOLLM2, 1, 1), (SMOLLM2, 16, 3), (LLAMA, 16, 4), (WIDE, 8, 4), (GEMMA, 16, 4)],
)
def test_queries_of_all_tokens_take_tiles_of_sixteen(shape: Any, tokens: int, query_tiles: int) -> None:
    g = attention(shape, tile_tokens=tokens)
    assert g.query_tiles == query_tiles
    assert g.local.bytes < STACK_BYTES


def test_weights_of_sixteen_slots_fill_rows_of_tiles_in_turn() -> None:
    assert [attention(SMOLLM2, tile_tokens=1).weights_at(tile) for tile in range(1)] == [0]
    assert [attention(WIDE, tile_tokens=1).weights_at(tile) for tile in range(2)] == [0, 32]
    wide_pages = SMOLLM2 | {"stride": 48}
    assert [attention(wide_pages, tile_tokens=1).weights_at(tile) for tile in range(3)] == [0, 512, 1024]


@pytest.mark.parametrize(("shape", "q_bytes"), [(SMOLLM2, 384), (LLAMA, 1024), (WIDE, 3072)])
def test_decode_memory_holds_q_keys_and_attention(shape: Any, q_bytes: int) -> None:
    g = DecodeAttentionGeometry(**shape, page_elements=0, step_slots=64, tile_tokens=1)
    assert g.token_local.offsets == {"q": 0, "rope": q_bytes, "rest": q_bytes + g.rope_local.bytes}
    assert g.token_local.bytes == q_bytes + g.rope_local.bytes + g.local.bytes


def test_a_window_takes_memory_for_the_values_that_it_cuts() -> None:
    g = attention(GEMMA, tile_tokens=1)
    whole = attention(GEMMA | {"window": None}, tile_tokens=1)
    assert g.local.bytes - whole.local.bytes == g.head_bytes


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA, WIDE])
def test_pages_in_bytes_have_their_scales_behind_each_head(shape: Any) -> None:
    g = attention(shape, tile_tokens=1, is_quantised=True)
    assert 2 * g.head_value_bytes == g.wide_head_bytes == attention(shape, tile_tokens=1).head_bytes
    assert g.head_bytes == g.stride * (g.head_dim + 4)
    assert g.head_bytes % 64 == 0
    assert g.local.sizes["wide_pages"] == g.step_pages * g.wide_kv_bytes
    assert all(offset % 64 == 0 for part in (g.local, g.rope_local) for offset in part.offsets.values())


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA, WIDE, GEMMA, GEMMA | {"stride": 32}])
def test_pages_in_bytes_fit_the_stack_once_widened(shape: Any) -> None:
    slots = widened_slots(shape["head_dim"])
    assert slots >= shape["stride"]
    tokens = min(16, 64 // (shape["q_heads"] // shape["kv_heads"]))
    sizes = {"step_slots": slots, "tile_tokens": tokens, "page_elements": 0, "is_quantised": True}
    assert PagedAttentionGeometry(**shape, **sizes).local.bytes < STACK_BYTES + (16 << 10)


def test_scores_are_powers_of_two_or_multiples_of_their_cap() -> None:
    capped = attention(LLAMA, tile_tokens=1, score_cap=50.0)
    assert capped.query_scale * capped.capped_scale == pytest.approx(
        attention(LLAMA, tile_tokens=1).query_scale
    )
    assert capped.query_scale == pytest.approx(1 / 50 / 128**0.5)
