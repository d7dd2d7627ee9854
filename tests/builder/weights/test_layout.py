from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.builder.quantise import quantise, quantise_rows
from shortfin_apps.llm.builder.weights.layout import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    LANES,
    BlockRows,
    Fp8Rows,
    Int8Panels,
    Panels,
    QuantisedPanels,
    RowMajor,
    TilePanels,
    WeightLayout,
    num_panels,
)
from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.spec import FloatType
from shortfin_apps.llm.model.weight_blocks import E2M1, Q4_1, Q8_0, BlockType, Terms
from tests.builder.random_blocks import BLOCK_TYPES, random_blocks

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Place:
    """The place of an output feature in the panels."""

    panel: int
    half: int
    lane: int

    @classmethod
    def of(cls, row: int, rows: int, gated: bool) -> Place:
        half_size = rows // 2
        if gated:
            return cls(row % half_size // LANES, row // half_size, row % LANES)
        return cls(row // (2 * LANES), row // LANES % 2, row % LANES)


NAME = "blk.0.ffn_down.weight"
CASES = [(1, False, 48), (2, False, 48), (2, True, 96), (1, True, 32), (2, False, 64), (8, True, 96)]


@pytest.mark.parametrize(("pair", "gated", "rows"), CASES)
def test_panels(pair: int, gated: bool, rows: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    layout = Panels("f32", pair, gated)
    [panels] = layout.store(matrix)
    assert {"w": (panels.shape, "f32")} == layout.stored("w", matrix.shape)
    split = panels.reshape(num_panels(rows), 64 // pair, 2, LANES, pair)
    for row in range(rows):
        at = Place.of(row, rows, gated)
        np.testing.assert_array_equal(split[at.panel, :, at.half, at.lane].reshape(-1), matrix[row])
    assert np.count_nonzero(panels) == np.count_nonzero(matrix)


@pytest.mark.parametrize(("gated", "rows"), [(False, 32), (True, 96), (False, 64)])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tile_panels(gated: bool, rows: int, dtype: FloatType) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, 96)).astype(FLOAT_DTYPES[dtype])
    layout = TilePanels(dtype, gated)
    [tiles] = layout.store(matrix)
    assert {"w": (tiles.shape, dtype)} == layout.stored("w", matrix.shape)
    steps = tiles.reshape(num_panels(rows), 3, 2, 16, LANES, 2)
    for row in range(rows):
        at = Place.of(row, rows, gated)
        np.testing.assert_array_equal(steps[at.panel, :, at.half, :, at.lane].reshape(-1), matrix[row])


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=str)
@pytest.mark.parametrize(("pair", "gated", "rows"), CASES)
def test_quantised_panels(kind: BlockType, pair: int, gated: bool, rows: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, 512)).astype(np.float32)
    blocks = random_blocks(matrix, kind)
    layout = QuantisedPanels(kind, pair, gated)
    quants, scales = layout.store(blocks)
    terms_type = "f16" if kind.group is None else "i8"
    assert layout.stored("w", matrix.shape) == {
        "w": (quants.shape, "i8"),
        "w.scales": (scales.shape, terms_type),
    }
    panels = num_panels(rows)
    if kind.bits == 4:
        both = quants.view(np.uint8)
        wide = np.stack([both & 15, both >> 4], axis=2)
    else:
        wide = quants
    wide = E2M1[wide] if kind.is_e2m1 else wide
    split = wide.reshape(panels, 512 // pair, 2, LANES, pair)
    terms = panel_terms(scales, kind).reshape(panels, -1, kind.num_terms, 2, LANES)
    for row in range(rows):
        at = Place.of(row, rows, gated)
        values = split[at.panel, :, at.half, at.lane].reshape(-1, kind.size).astype(np.float32)
        term = terms[at.panel, :, :, at.half, at.lane]
        expected = values * term[:, :1] + (term[:, 1:] if kind.has_minima else 0)
        np.testing.assert_array_equal(expected.reshape(-1), blocks.dequantise()[row])


def panel_terms(stored: Array, kind: BlockType) -> F32:
    """[panels, blocks, all terms of a block]."""
    if kind.group is None:
        return stored.astype(np.float32)
    panels, groups, _ = stored.shape
    count = 32 * kind.num_terms
    shared = np.ascontiguousarray(stored[..., : 2 * count]).view(np.float16).astype(np.float32)
    own = stored[..., 2 * count :].reshape(panels, groups, -1, count)
    return (shared[:, :, None] * own).reshape(panels, -1, count)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=str)
@pytest.mark.parametrize("columns", [256, 512])
def test_block_rows(kind: BlockType, columns: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((48, columns)).astype(np.float32)
    blocks = random_blocks(matrix, kind)
    layout = BlockRows(kind)
    quants, *terms = layout.store(blocks)
    names = ("w", "w.scales", "w.minima")
    kept = {name: (each.shape, str(each.dtype)) for name, each in zip(names, (quants, *terms), strict=False)}
    dtypes = {"i8": "int8", "f16": "float16"}
    stored = layout.stored("w", matrix.shape)
    assert {name: (shape, dtypes[dtype]) for name, (shape, dtype) in stored.items()} == kept
    if kind.bits == 4:
        both = quants.view(np.uint8).reshape(48, -1, 16)
        quants = np.stack([both & 15, both >> 4], axis=2).reshape(matrix.shape)
    quants = E2M1[quants] if kind.is_e2m1 else quants
    scales, *minima = (row_terms(each, kind, columns) for each in terms)
    values = quants.reshape(48, -1, kind.size) * scales[:, :, None]
    for minimum in minima:
        values += minimum[:, :, None]
    np.testing.assert_array_equal(values.reshape(matrix.shape), blocks.dequantise())


@pytest.mark.parametrize(
    "kind",
    [
        *(Q4_1, BlockType(4, has_minima=True, group=256)),
        *(Q8_0, BlockType(8, 16, group=256), BlockType(8, has_minima=True, group=256)),
    ],
    ids=str,
)
def test_block_rows_in_bf16_have_what_kernels_multiply_by(kind: BlockType) -> None:
    columns = 512
    blocks = random_blocks(np.random.default_rng(0).standard_normal((48, columns)).astype(np.float32), kind)
    layout = BlockRows(kind, terms_in_bf16=True)
    quants, scales, *middles = layout.store(blocks)
    stored = layout.stored("w", (48, columns)).values()
    assert [(each.shape, each.dtype) for each in (quants, scales, *middles)] == [
        (shape, MLIR_DTYPES[dtype]) for shape, dtype in stored
    ]
    np.testing.assert_array_equal(quants, BlockRows(kind).store(blocks)[0])
    wide_scales, *wide_minima = (terms.wide() for terms in blocks.terms)
    np.testing.assert_array_equal(scales, wide_scales.astype(scales.dtype))
    for middle, minimum in zip(middles, wide_minima, strict=True):
        least = minimum + 8 * wide_scales if kind.bits == 4 else minimum
        np.testing.assert_array_equal(middle, least.astype(scales.dtype))


def row_terms(stored: Array, kind: BlockType, columns: int) -> F32:
    """[rows, blocks]."""
    if kind.group is None:
        return stored.astype(np.float32)
    groups, count = columns // kind.group, columns // kind.size
    shared = np.ascontiguousarray(stored[:, : 2 * groups]).view(np.float16)
    return Terms(shared, stored[:, 2 * groups : 2 * groups + count]).wide()


@pytest.mark.parametrize(("gated", "rows"), [(False, 48), (True, 96), (False, 64)])
@pytest.mark.parametrize(("columns", "pair"), [(64, 4), (80, 4), (64, 8), (80, 8)])
def test_int8_panels(gated: bool, rows: int, columns: int, pair: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    layout = Int8Panels(gated, pair)
    quants, scales = layout.store(matrix)
    assert layout.stored("w", matrix.shape) == {"w": (quants.shape, "i8"), "w.scales": (scales.shape, "f32")}
    steps = quants.reshape(num_panels(rows), -(-columns // 64), 2, 64 // pair, LANES, pair)
    wanted_quants, wanted_scales = quantise_rows(matrix)
    for row in range(rows):
        at = Place.of(row, rows, gated)
        got = steps[at.panel, :, at.half, :, at.lane].reshape(-1)
        np.testing.assert_array_equal(got[:columns], wanted_quants[row])
        assert scales.reshape(-1, 2, LANES)[at.panel, at.half, at.lane] == wanted_scales[row]
    assert np.count_nonzero(quants) == np.count_nonzero(wanted_quants)


@pytest.mark.parametrize("layout", [QuantisedPanels(Q8_0, 2, gated=False), BlockRows(Q8_0)])
def test_floats_are_quantised_on_the_way(layout: WeightLayout) -> None:
    matrix = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    for direct, through in zip(layout.store(matrix), layout.store(quantise(matrix, 8)), strict=True):
        np.testing.assert_array_equal(direct, through)


def test_f16_saturates() -> None:
    [value] = RowMajor("f16").store(np.array([1e6, -1e6, 1.0], np.float32))
    assert value.tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize("kind", FP8_DTYPES)
def test_fp8_rows(kind: Fp8Type) -> None:
    matrix = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    layout = Fp8Rows(kind)
    quants, scales = layout.store(matrix)
    assert layout.stored("w", matrix.shape) == {"w": (quants.shape, kind), "w.scales": (scales.shape, "f32")}
    assert quants.dtype == FP8_DTYPES[kind]
    np.testing.assert_allclose(quants.astype(np.float32) * scales[:, None], matrix, rtol=2**-4, atol=1e-2)
