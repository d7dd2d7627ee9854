"""The choice of a matmul's tile."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from shortfin_apps.llm.builder.graph.emitter import Bounded
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP, PART_DEPTH
from shortfin_apps.llm.builder.lowering.triton.tiles import (
    FEW_ROWS,
    AttentionTile,
    MatmulTile,
    TileTable,
    fitted,
    one_launch_tiles,
    tiles_of,
)
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0

AMD = Target("hip:gfx942", (), "amdgpu", "gfx942", frozenset())
HOPPER = Target("cuda:sm_90", (), "nvptx", "sm_90", frozenset())
AMPERE = replace(HOPPER, device="cuda:sm_80", cpu="sm_80")
TARGETS = pytest.mark.parametrize(
    "table", [pytest.param(tiles_of(target), id=target.cpu) for target in (AMD, HOPPER, AMPERE)]
)
IN_BF16 = [BlockRows(blocks, terms_in_bf16=True) for blocks in (Q4_1, Q8_0)]
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [RowMajor("bf16"), RowMajor("f32"), BlockRows(Q4_1), *IN_BF16, BlockRows(Q8_0), Fp8Rows("f8E4M3FN")],
)
TOKENS: list[int | str] = [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513, 4096, "tokens"]
FEATURES = [64, 576, 960, 2048, 3072, 4096, 5120, 6144, 8192, 28672, 128256]


def check_depth(tile: MatmulTile, layout: WeightLayout | None) -> None:
    """Its waves share K, in parts of a size that kernels take."""
    assert tile.parts in (1, tile.tuning.num_waves)
    assert tile.depth_bytes % (2 * tile.parts * PART_DEPTH if tile.parts > 1 else 64) == 0
    if isinstance(layout, Fp8Rows):
        groups = tile.depth_bytes / FP8_GROUP
        assert groups.is_integer() if tile.parts == 1 else groups == tile.parts


@TARGETS
@LAYOUTS
def test_every_matmul_has_a_tile_of_sizes_that_triton_takes(
    table: TileTable, layout: WeightLayout | None
) -> None:
    for tokens in TOKENS:
        for features in FEATURES:
            tile = table.matmul(tokens, (features, 576), layout)
            for size in (tile.rows, tile.columns, tile.depth_bytes):
                assert size.bit_count() == 1
            # What a matrix instruction takes; sums of squares are of 16 columns each.
            assert tile.rows >= (16 if tile.parts == 1 else 8)
            assert tile.columns >= 16
            check_depth(tile, layout)


def test_many_rows_have_another_attention_where_it_is_known_to_be_faster() -> None:
    few, amd = tiles_of(HOPPER), tiles_of(AMD)
    for rows in (1, FEW_ROWS, Bounded("rows", FEW_ROWS)):
        assert few.for_rows(rows) == few
    many = few.for_rows(FEW_ROWS + 1)
    assert (many.decode_attention, many.split) == (few.batch_attention, few.batch_split)
    # Rows that are not known may be few, and then have to share long contexts.
    for unknown in ("rows", Bounded("rows", 512)):
        assert few.for_rows(unknown) == replace(many, split=few.split)
    assert amd.for_rows(512) == amd


@TARGETS
@LAYOUTS
def test_kernels_of_one_name_have_one_tile(table: TileTable, layout: WeightLayout | None) -> None:
    """A module has kernels of several numbers of tokens for one weight, named by it and by their tiles."""
    for features in FEATURES:
        tiles = {table.matmul(tokens, (features, 576), layout) for tokens in TOKENS}
        assert len({tile.suffix for tile in tiles}) == len(tiles)


@TARGETS
@LAYOUTS
def test_more_tokens_take_no_fewer_rows(table: TileTable, layout: WeightLayout | None) -> None:
    known = [tokens for tokens in TOKENS if isinstance(tokens, int)]
    for features in FEATURES:
        rows = [table.matmul(tokens, (features, 576), layout).rows for tokens in known]
        assert rows == sorted(rows)


def test_experts_in_floats_of_4_bits_have_tiles_of_their_own_on_hopper() -> None:
    tiles = [tiles_of(HOPPER).float4_expert(rows) for rows in (1, 2, 8, 9, 16, 32, 64, 4096)]
    rows = [tile.rows for tile in tiles if tile]
    assert rows == [8, 16, 16, 32, 32, 64, 128, 128]
    assert tiles_of(AMD).float4_expert(1) is None


def test_small_weights_take_small_tiles_on_hopper() -> None:
    """A weight of 576 features has too few large tiles for 132 multiprocessors."""
    table = tiles_of(HOPPER)
    assert [table.matmul(128, (features, 576)).columns for features in (576, 4096, 28672)] == [32, 64, 256]


def test_tokens_that_are_not_known_count_as_a_prefill_of_some_hundred() -> None:
    table = tiles_of(HOPPER)
    assert table.matmul("tokens", (4096, 4096)) == table.matmul(512, (4096, 4096))
    assert table.matmul("tokens", (4096, 4096)) != table.matmul(2048, (4096, 4096))


@pytest.mark.parametrize("layout", [BlockRows(Q4_1), *IN_BF16, BlockRows(Q8_0)], ids=str)
@pytest.mark.parametrize("features", FEATURES)
def test_up_to_32_tokens_all_tiles_for_blocks_add_in_one_order_on_hopper(
    layout: BlockRows, features: int
) -> None:
    table = tiles_of(HOPPER)
    assert {table.matmul(tokens, (features, 576), layout).parts for tokens in (1, 9, 17, 32)} == {4}


@pytest.mark.parametrize("features", FEATURES)
def test_up_to_16_tokens_all_tiles_for_16_bit_floats_add_in_one_order_on_hopper(features: int) -> None:
    table = tiles_of(HOPPER)
    for layout, parts in ((RowMajor("bf16"), 4), (RowMajor("f16"), 4), (RowMajor("f32"), 1)):
        tiles = [table.matmul(tokens, (features, 576), layout) for tokens in (1, 8, 9, 16)]
        assert {tile.parts for tile in tiles} == {parts}


def test_a_tile_has_at_most_the_stages_that_shared_memory_has_room_for() -> None:
    tile = MatmulTile(8, 24, 1024, Tuning(4, 4))  # loads 32 KiB a step
    stages = [tile.with_stages(most, 128 << 10).tuning.num_stages for most in (1, 2, 4, 5, 8)]
    assert stages == [1, 2, 4, 5, 5]
    assert tile.with_stages(8, 16 << 10).tuning.num_stages == 2


@pytest.mark.parametrize("parts", [1, 4])
def test_a_tile_with_more_columns_has_depth_for_its_parts(parts: int) -> None:
    tile = MatmulTile(8, 16, 1024, Tuning(4, 3), parts=parts).with_columns(256)
    assert (tile.columns, tile.parts) == (256, parts)
    assert tile.depth_bytes % (2 * parts * PART_DEPTH if parts > 1 else 64) == 0


def test_other_nvidia_gpus_have_tiles_of_their_own() -> None:
    assert tiles_of(AMPERE) != tiles_of(HOPPER)
    assert tiles_of(replace(HOPPER, cpu="sm_90a")) == tiles_of(HOPPER)


def test_an_attention_has_fewer_slots_of_wide_heads_and_room_for_all_that_share_them() -> None:
    tile = AttentionTile(16, 128, Tuning(), most_key_bytes=16 << 10)
    sizes = [(fitted(tile, sharing, head_bytes)) for sharing, head_bytes in ((3, 128), (24, 256), (1, 160))]
    assert [(each.queries, each.columns) for each in sizes] == [(16, 128), (32, 64), (16, 64)]


def test_workgroups_that_share_a_unit_also_share_its_memory() -> None:
    alone, shared = one_launch_tiles(HOPPER), one_launch_tiles(HOPPER, per_unit=2)
    assert shared.programs == 2 * alone.programs
    assert (alone.most_shared_bytes, shared.most_shared_bytes) == (None, 113 << 10)
    for features in FEATURES:
        for layout in (RowMajor("bf16"), RowMajor("f32")):
            tile = shared.matmul(8, (features, 4096), layout)
            ahead = tile.tuning.num_stages - 1
            assert ahead * (tile.rows + tile.columns) * tile.depth_bytes <= 113 << 10


@pytest.mark.parametrize("target", [AMD, HOPPER], ids=lambda target: target.cpu)
@pytest.mark.parametrize("features", [16, 576, 960, 3072, 6144, 28672, 49152, 128256])
def test_no_workgroup_of_one_launch_has_more_columns_than_with_other_tiles(
    target: Target, features: int
) -> None:
    tiles = one_launch_tiles(target)
    most = {columns: ceil(ceil(features / columns) / tiles.programs) * columns for columns in (16, 32, 64)}
    chosen = tiles.matmul(8, (features, 64))
    assert most[chosen.columns] == min(most.values())
    assert chosen.tuning.num_waves == tiles.tuning.num_waves


@pytest.mark.parametrize("target", [AMD, HOPPER, AMPERE], ids=lambda target: target.cpu)
@pytest.mark.parametrize(
    "layout",
    [BlockRows(Q4_1), *IN_BF16, BlockRows(Q8_0), Fp8Rows("f8E4M3FN"), RowMajor("bf16"), RowMajor("f32")],
    ids=str,
)
@pytest.mark.parametrize("features", FEATURES)
def test_one_launch_adds_in_the_order_of_separate_launches(
    target: Target, layout: WeightLayout, features: int
) -> None:
    shape = (features, 576)
    for tokens in (1, 8, 16):
        tile = one_launch_tiles(target).matmul(tokens, shape, layout)
        assert tile.parts == tiles_of(target).matmul(tokens, shape, layout).parts
        assert tile.rows >= tokens
        check_depth(tile, layout)
