"""Types of blocks, and what becomes of blocks as another type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.model.weight_blocks import Q4_1, Q8_0, BlockType, common_type, stack
from tests.builder.random_blocks import BLOCK_TYPES, random_blocks

MATRIX = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
TYPES = st.sampled_from(BLOCK_TYPES)


@given(kinds=st.lists(TYPES, min_size=1, max_size=4))
def test_blocks_of_several_types_are_stacked_without_loss(kinds: list[BlockType]) -> None:
    parts = [random_blocks(MATRIX, kind) for kind in kinds]
    common = common_type(kinds)
    converted = [part.converted(common) for part in parts]
    kept = stack([each for each in converted if each is not None]).dequantise()
    np.testing.assert_array_equal(kept, np.concatenate([part.dequantise() for part in parts]))


@given(kind=TYPES, to=TYPES)
def test_a_type_has_room_for_blocks_or_has_not(kind: BlockType, to: BlockType) -> None:
    """Values are the same, but for terms that are rounded to f16."""
    blocks = random_blocks(MATRIX, kind)
    converted = blocks.converted(to)
    if kind.bits > to.bits or kind.has_minima > to.has_minima or kind.size < to.size:
        assert converted is None
    if converted is not None:
        assert converted.type == to
        is_rounded = to.group is None and kind.group is not None
        values = blocks.dequantise()
        tolerance = 2e-3 * np.abs(values).max() if is_rounded else 0
        np.testing.assert_allclose(converted.dequantise(), values, rtol=0, atol=tolerance)


@given(kinds=st.lists(TYPES, min_size=1, max_size=4))
def test_the_common_type_does_not_depend_on_the_order(kinds: list[BlockType]) -> None:
    assert common_type(kinds) == common_type(kinds[::-1])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([Q8_0, Q8_0], Q8_0),
        ([Q8_0, Q4_1], BlockType(8, has_minima=True)),
        ([BlockType(4, has_minima=True, group=256), BlockType(8, 16, group=256)], "q8_b16m_g256"),
        ([Q8_0, BlockType(8, 16, group=256)], "q8_b16_g32"),
    ],
)
def test_common_types(kinds: list[BlockType], expected: BlockType | str) -> None:
    assert str(common_type(kinds)) == str(expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=str)
def test_rows_are_taken_with_their_terms(kind: BlockType) -> None:
    blocks, order = random_blocks(MATRIX, kind), np.array([3, 0, 2])
    np.testing.assert_array_equal(blocks.take_rows(order).dequantise(), blocks.dequantise()[order])
