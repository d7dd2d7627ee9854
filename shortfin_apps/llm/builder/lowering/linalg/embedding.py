"""The embedding's gather, from every layout that a weight can have (see weights/layout.py)."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.model.spec import ModelSpec
from shortfin_apps.llm.builder.quantise import BLOCK
from shortfin_apps.llm.builder.weights.layout import (
    LANES,
    PANEL,
    Int8Panels,
    RowMajor,
    TilePanels,
    WeightLayout,
)
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


def embedding(e: Emitter, spec: ModelSpec, weights: WeightTypes, tokens: Tensor, weight: str) -> Tensor:
    """[tokens] i64 -> [tokens, hidden] f32; ids out of range read the table's last row, not past it."""
    table, *scales = weights.load(e, weight)
    extracting, widening, result = _extract(table, weights.layout(weight)), *_widen(table, scales)
    body = f"""\
  %d = linalg.index 1 : index
  %id = arith.index_cast %a : i64 to index
  %row = arith.minui %id, {e.constant(spec.vocab_size - 1)} : index
{extracting}
{widening}
  %multiplier = arith.constant {spec.embedding_scale:.9e} : f32
  %multiplied = arith.mulf {result}, %multiplier : f32
  linalg.yield %multiplied : f32"""
    return e.elementwise("td", ("td", (tokens.shape[0], spec.hidden_size), "f32"), [(tokens, "t")], body)


def _extract(table: Tensor, layout: WeightLayout) -> str:
    """Text that sets %w: element %d of row %row."""
    if isinstance(layout, RowMajor):
        return f"  %w = tensor.extract {table.name}[%row, %d] : {table.type}"
    tiled = isinstance(layout, Int8Panels | TilePanels)
    return f"""\
  %columns = arith.constant {PANEL} : index
  %panel = arith.divui %row, %columns : index
  %column = arith.remui %row, %columns : index
{_extract_from_tiles(table) if tiled else _extract_from_panels(table)}"""


def _extract_from_panels(table: Tensor) -> str:
    """Text that sets %w: element %d of %panel's %column, stored [panels, K / pair, 32 * pair]."""
    assert isinstance(table.shape[2], int)
    return f"""\
  %pair = arith.constant {table.shape[2] // PANEL} : index
  %k = arith.divui %d, %pair : index
  %parity = arith.remui %d, %pair : index
  %first = arith.muli %column, %pair : index
  %element = arith.addi %first, %parity : index
  %w = tensor.extract {table.name}[%panel, %k, %element] : {table.type}"""


def _extract_from_tiles(table: Tensor) -> str:
    """The same, stored [panels, tiles, 2, 16, 16 * pair]."""
    steps, row = table.shape[3:]
    assert isinstance(steps, int)
    assert isinstance(row, int)
    pair = row // LANES
    return f"""\
  %lanes = arith.constant {LANES} : index
  %tile_size = arith.constant {steps * pair} : index
  %pair = arith.constant {pair} : index
  %half = arith.divui %column, %lanes : index
  %lane = arith.remui %column, %lanes : index
  %tile = arith.divui %d, %tile_size : index
  %in_tile = arith.remui %d, %tile_size : index
  %step = arith.divui %in_tile, %pair : index
  %in_step = arith.remui %in_tile, %pair : index
  %first = arith.muli %lane, %pair : index
  %element = arith.addi %first, %in_step : index
  %w = tensor.extract {table.name}[%panel, %tile, %half, %step, %element] : {table.type}"""


def _widen(table: Tensor, scales: list[Tensor]) -> tuple[str, str]:
    """Text that widens %w to f32, times its column's or block's scale if it has one; the result's name."""
    if not scales:
        return (
            ("", "%w")
            if table.dtype == "f32"
            else (f"  %value = arith.extf %w : {table.dtype} to f32", "%value")
        )
    if scales[0].dtype == "f32":
        scale = f"  %scale = tensor.extract {scales[0].name}[%panel, %column] : {scales[0].type}"
    else:
        scale = f"""\
  %block_size = arith.constant {BLOCK} : index
  %block = arith.divui %d, %block_size : index
  %narrow = tensor.extract {scales[0].name}[%panel, %block, %column] : {scales[0].type}
  %scale = arith.extf %narrow : {scales[0].dtype} to f32"""
    lines = f"""\
{scale}
  %quant = arith.sitofp %w : i8 to f32
  %value = arith.mulf %quant, %scale : f32"""
    return lines, "%value"
