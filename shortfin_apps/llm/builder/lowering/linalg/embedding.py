"""The gather of embeddings, for every weight layout (see weights/layout.py)."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.weights.layout import (
    LANES,
    PANEL,
    Int8Panels,
    RowMajor,
    TilePanels,
    WeightLayout,
)
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import ModelSpec
from shortfin_apps.llm.model.weight_blocks import BlockType


def embedding(e: Emitter, spec: ModelSpec, weights: WeightTypes, tokens: Tensor, weight: str) -> Tensor:
    """Gather embeddings: token ids [tokens] i64 -> [tokens, hidden] f32, times spec.embedding_scale."""
    return rows_of(e, weights, tokens, weight, spec.embedding_scale)


def rows_of(e: Emitter, weights: WeightTypes, tokens: Tensor, weight: str, scale: float) -> Tensor:
    """Gather rows of a table [vocab, features]: token ids [tokens] i64 -> [tokens, features] f32 * `scale`.

    Ids out of range get the last row of the table.
    """
    table, *scales = weights.load(e, weight)
    layout = weights.layout(weight)
    extracting, widening, result = _extract(table, layout), *_widen(table, scales, layout.blocks)
    vocab, features = weights.shape(weight)
    body = f"""\
  %d = linalg.index 1 : index
  %id = arith.index_cast %a : i64 to index
  %row = arith.minui %id, {e.constant(vocab - 1)} : index
{extracting}
{widening}
  %multiplier = arith.constant {scale:.9e} : f32
  %multiplied = arith.mulf {result}, %multiplier : f32
  linalg.yield %multiplied : f32"""
    return e.elementwise("td", ("td", (tokens.shape[0], features), "f32"), [(tokens, "t")], body)


def _extract(table: Tensor, layout: WeightLayout) -> str:
    """Return MLIR that sets %w to the stored element %d of the table's row %row.

    For panels, also sets %panel and %column.
    """
    if isinstance(layout, RowMajor):
        return f"  %w = tensor.extract {table.name}[%row, %d] : {table.type}"
    tiled = isinstance(layout, Int8Panels | TilePanels)
    return f"""\
  %columns = arith.constant {PANEL} : index
  %panel = arith.divui %row, %columns : index
  %column = arith.remui %row, %columns : index
{_extract_from_tiles(table) if tiled else _extract_from_panels(table)}"""


def _extract_from_panels(table: Tensor) -> str:
    """Return MLIR that sets %w to element %d of %column in %panel.

    The table is stored as [panels, K / pair, PANEL * pair].
    """
    assert isinstance(table.shape[2], int)
    return f"""\
  %pair = arith.constant {table.shape[2] // PANEL} : index
  %k = arith.divui %d, %pair : index
  %parity = arith.remui %d, %pair : index
  %first = arith.muli %column, %pair : index
  %element = arith.addi %first, %parity : index
  %w = tensor.extract {table.name}[%panel, %k, %element] : {table.type}"""


def _extract_from_tiles(table: Tensor) -> str:
    """Return MLIR that sets %w to element %d of %column in %panel.

    The table is stored as [panels, tiles, 2, 16, 16 * pair].
    """
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


def _widen(table: Tensor, scales: list[Tensor], blocks: BlockType | None) -> tuple[str, str]:
    """Return MLIR that converts %w to f32 and dequantises it, and the name of the result."""
    if not scales:
        return (
            ("", "%w")
            if table.dtype == "f32"
            else (f"  %value = arith.extf %w : {table.dtype} to f32", "%value")
        )
    if blocks is not None:
        return _widen_blocks(scales[0], blocks), "%value"
    lines = f"""\
  %scale = tensor.extract {scales[0].name}[%panel, %column] : {scales[0].type}
  %quant = arith.sitofp %w : i8 to f32
  %value = arith.mulf %quant, %scale : f32"""
    return lines, "%value"


def _widen_blocks(terms: Tensor, blocks: BlockType) -> str:
    """Return MLIR that sets %value f32 to %w i8 times the scale of its block, plus the block's minimum."""
    extract = _own_term if blocks.group is None else _shared_term
    names = ("scale", "minimum")[: blocks.num_terms]
    return "\n".join(
        [
            "  %nothing = arith.constant 0.0 : f32",
            f"  %block_size = arith.constant {blocks.size} : index",
            "  %block = arith.divui %d, %block_size : index",
            *(extract(terms, blocks, name, number) for number, name in enumerate(names)),
            "  %quant = arith.sitofp %w : i8 to f32",
            "  %scaled = arith.mulf %quant, %scale : f32",
            f"  %value = arith.addf %scaled, {'%minimum' if blocks.has_minima else '%nothing'} : f32",
        ]
    )


def _own_term(terms: Tensor, blocks: BlockType, name: str, number: int) -> str:
    """Return MLIR that sets %NAME f32 to the block's scale (number 0) or minimum (1), stored as f16."""
    at = f"%{name}_at, " if blocks.has_minima else ""
    return f"""\
  %{name}_at = arith.constant {number} : index
  %{name}_f16 = tensor.extract {terms.name}[%panel, %block, {at}%column] : {terms.type}
  %{name} = arith.extf %{name}_f16 : f16 to f32"""


def _shared_term(terms: Tensor, blocks: BlockType, name: str, number: int) -> str:
    """Return MLIR that sets %NAME f32 to the block's scale (number 0) or minimum (1).

    For blocks in groups: the group's f16 times the block's i8. Both are in the group's bytes in `terms`.
    """
    assert blocks.group is not None
    t, place = f"%{name}", f"{terms.name}[%panel, {f'%{name}_group'}, "
    own_bytes = PANEL * blocks.num_terms
    return f"""\
  {t}_group_blocks = arith.constant {blocks.group // blocks.size} : index
  {t}_group = arith.divui %block, {t}_group_blocks : index
  {t}_in_group = arith.remui %block, {t}_group_blocks : index
  {t}_one = arith.constant 1 : index
  {t}_two = arith.constant 2 : index
  {t}_eight = arith.constant 8 : i16
  {t}_shared_at = arith.constant {2 * PANEL * number} : index
  {t}_shared = arith.muli %column, {t}_two : index
  {t}_low_at = arith.addi {t}_shared, {t}_shared_at : index
  {t}_high_at = arith.addi {t}_low_at, {t}_one : index
  {t}_low_byte = tensor.extract {place}{t}_low_at] : {terms.type}
  {t}_high_byte = tensor.extract {place}{t}_high_at] : {terms.type}
  {t}_low = arith.extui {t}_low_byte : i8 to i16
  {t}_high = arith.extui {t}_high_byte : i8 to i16
  {t}_top = arith.shli {t}_high, {t}_eight : i16
  {t}_bits = arith.ori {t}_top, {t}_low : i16
  {t}_f16 = arith.bitcast {t}_bits : i16 to f16
  {t}_unit = arith.extf {t}_f16 : f16 to f32
  {t}_own_bytes = arith.constant {own_bytes} : index
  {t}_own_at = arith.constant {2 * own_bytes + PANEL * number} : index
  {t}_own_block = arith.muli {t}_in_group, {t}_own_bytes : index
  {t}_own_term = arith.addi {t}_own_block, {t}_own_at : index
  {t}_place = arith.addi {t}_own_term, %column : index
  {t}_byte = tensor.extract {place}{t}_place] : {terms.type}
  {t}_multiple = arith.sitofp {t}_byte : i8 to f32
  {t} = arith.mulf {t}_unit, {t}_multiple : f32"""
