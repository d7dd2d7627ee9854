"""Geometry of the fused layer's matmuls out[rows, n] = x[rows, k_size] . w[n, k_size]^T.

Defines the sizes common to all matmuls, and the geometry for weights in quantised blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    Int8Tiles,
    QuantBlocks,
)
from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import tail_sizes
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue, is_gated
from shortfin_apps.llm.builder.kernels.fused.panel_blocks import PanelBlocks
from shortfin_apps.llm.builder.kernels.fused.stages import QuantiseBlocksGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.chosen_layout import MATRIX_BYTES
from shortfin_apps.llm.builder.weights.layout import DOT_BYTES, PANEL
from shortfin_apps.llm.model.spec import QuantBits
from shortfin_apps.llm.model.weight_blocks import BLOCK, BlockType

CONFIG_BYTES = 64  # the operand of LDTILECFG
SUMS_ROW_BYTES = 4 * PANEL
_ROW_BLOCK_BYTES = 768 << 10  # bytes of x per work item: its rows share the L2 cache with the weights
_MAX_ROWS = 512
_MAX_ITEM_BYTES = 256 << 10  # bytes of weights per work item: other workers wait for the last item
_MIN_ITEMS = 48
_ACCUMULATORS = 4  # tile registers for accumulators of blocks


@dataclass(frozen=True, kw_only=True)
class MatmulGeometry(ABC):
    """Sizes common to all matmuls.

    If gated, panels have 16 columns of gate and 16 of up, and out has n / 2 columns.
    """

    n: int
    k_size: int
    epilogue: Epilogue
    sums_row_bytes: ClassVar[int] = SUMS_ROW_BYTES

    @property
    @abstractmethod
    def panel_bytes(self) -> int:
        """Bytes of the weights of a panel, which has 32 columns."""

    @property
    @abstractmethod
    def local(self) -> Regions:
        """Scratch memory, which the caller of the stage's function allocates."""

    @property
    def is_gated(self) -> bool:
        return is_gated(self.epilogue)

    @property
    def panels(self) -> int:
        return self.n // PANEL

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.is_gated else self.n

    @property
    def out_row_bytes(self) -> int:
        """Bytes of a row-major output row: bf16 if gated, otherwise f32."""
        return self.out_features * (2 if self.is_gated else 4)

    @property
    def panel_out_bytes(self) -> int:
        return self.out_row_bytes // self.panels

    @property
    def cached_row_bytes(self) -> int:
        """Bytes of a row of x, from which `row_block` follows."""
        return 2 * self.k_size

    @property
    def row_block(self) -> int:
        """Maximum rows per work item."""
        rows = _ROW_BLOCK_BYTES // self.cached_row_bytes // PANEL * PANEL
        return max(PANEL, min(rows, _MAX_ROWS))

    @property
    def panels_per_item(self) -> int:
        panels = min(self.panels // _MIN_ITEMS, _MAX_ITEM_BYTES // self.panel_bytes)
        # The results of two gated panels fill one row of a tile, which two workers should not both write.
        return max(2, panels // 2 * 2) if self.is_gated else max(1, panels)

    @property
    def column_groups(self) -> int:
        """Groups of `panels_per_item` panels."""
        return -(-self.panels // self.panels_per_item)


@dataclass(frozen=True, kw_only=True)
class MatmulBytesGeometry(MatmulGeometry):
    """An int8 matmul with a scale per row of x and per column, on AMX tiles or on vectors."""

    @property
    def x(self) -> Int8Tiles:
        return Int8Tiles(self.k_size)

    @property
    def cached_row_bytes(self) -> int:
        return self.x.row_bytes

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of w, which has a tile per half of the panel for every 64 bytes of K."""
        return PANEL * self.cached_row_bytes


@dataclass(frozen=True, kw_only=True)
class MatmulBlocksGeometry(MatmulGeometry):
    """Weights in `blocks` of 16 or 32 (matmul_blocks_function.mlir.j2); x has blocks of 32, of `x_bits`.

    `pair`: neighbours along K that are contiguous in w.

    `has_bf16`: an instruction rounds f32 to bf16. `has_wide_vectors`: AVX-512. `has_neon`: NEON. `has_dot`:
    dot products of unsigned by signed bytes, on NEON of signed bytes. `has_tiles`: AMX, which implies all of
    these but NEON.
    """

    blocks: BlockType
    x_bits: QuantBits
    pair: int = DOT_BYTES
    has_tiles: bool = True
    has_bf16: bool = True
    has_wide_vectors: bool = True
    has_dot: bool = True
    has_neon: bool = False
    chunk_bytes: ClassVar[int] = 20 << 10  # bytes of a panel that stay in the L1 cache
    copy_bytes: ClassVar[int] = PANEL * BLOCK  # bytes of a panel's block, at one byte per quant

    @property
    def x(self) -> QuantBlocks:
        return QuantBlocks(self.k_size, self.x_bits)

    @property
    def quantise(self) -> QuantiseBlocksGeometry:
        """The quantisation of `out` to QuantBlocks, if gated."""
        return QuantiseBlocksGeometry(
            self.out_features,
            self.x_bits,
            is_tiled=False,
            has_wide_vectors=self.has_wide_vectors,
            has_neon=self.has_neon,
        )

    @property
    def has_smmla(self) -> bool:
        """Whether w is packed for SMMLA, NEON's matrix products."""
        return self.pair == MATRIX_BYTES

    @property
    def has_signs(self) -> bool:
        """Whether the quants of w are signed."""
        return self.w.bits == 8

    @property
    def is_shifted(self) -> bool:
        """Whether the vector kernels read weights as unsigned bytes q + 128."""
        return self.has_signs and self.has_dot and not self.has_neon

    @property
    def tile_rows(self) -> int:
        """Rows per vector tile.

        Each row has two sums and two products in registers: AVX-512 has 32, others 16 of half the width.
        """
        return 8 if self.has_wide_vectors else 2

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Rows of each of the smaller tiles for the remaining rows: descending powers of two."""
        return tail_sizes(self.tile_rows)

    @property
    def w(self) -> PanelBlocks:
        return PanelBlocks(self.k_size, self.blocks)

    @property
    def panel_bytes(self) -> int:
        return self.w.panel_bytes

    @property
    def paired_blocks(self) -> int:
        """Blocks along K, rounded down to an even number."""
        return self.x.blocks // 2 * 2

    @property
    def chunk_blocks(self) -> int:
        """Blocks per chunk of K: an even number, so that chunks are nearly equal."""
        pairs = self.x.blocks // 2
        chunks = max(1, -(-2 * pairs * self.wide_block_bytes // self.chunk_bytes))
        return 2 * max(1, -(-pairs // chunks))

    @property
    def part_w_bytes(self) -> int:
        """Bytes of the quants of a panel for one part along K, at one byte per quant."""
        return PANEL * self.blocks.size

    @property
    def copies(self) -> int:
        """Copies of a block that tiles read: for weights of 4 bits, one for each digit of x."""
        return self.x.digits if self.w.bits == 4 else 1

    @property
    def wide_block_bytes(self) -> int:
        """Bytes of the copies of a panel's block, at one byte per quant."""
        return self.copy_bytes * self.copies

    @property
    def accumulators(self) -> int:
        """Accumulator tiles for a block of x: one per part and, without a copy for each digit, per digit."""
        return self.w.parts * self.x.digits // self.copies

    @property
    def is_whole(self) -> bool:
        """Whether a product of tiles covers a block of x with all of its digits."""
        return self.w.parts == self.accumulators == 1

    @property
    def tile_k(self) -> int:
        """Elements along K of a product of tiles, in which digits count separately."""
        return self.x.quant_row_bytes if self.is_whole else self.blocks.size

    @property
    def has_two_sets(self) -> bool:
        """Whether four tile registers suffice for the accumulators of two blocks."""
        return 2 * self.accumulators <= _ACCUMULATORS

    @property
    def tile_shapes(self) -> list[tuple[int, int]]:
        """(rows, bytes of a row) of the tile registers: accumulators, x, w."""
        accumulator = TILE_ROWS, TILE_ROW_BYTES
        x, w = (TILE_ROWS, self.tile_k), (self.tile_k // DOT_BYTES, TILE_ROW_BYTES)
        return [*[accumulator] * _ACCUMULATORS, x, w]

    def first_accumulator(self, sums: int) -> int:
        """Return the first tile register of the set `sums` of accumulators."""
        return sums * self.accumulators if self.has_two_sets else 0

    def tile_products(self, sums: int) -> list[tuple[int, bool, int, int]]:
        """List the products of tiles of a block into the set `sums`.

        Each is: the accumulator, whether it must be zeroed before, and the bytes from a block of x and of w
        to the tiles.
        """
        first, shares_sum = self.first_accumulator(sums), self.accumulators == self.w.parts
        if self.is_whole:
            return [(first, True, 0, 0)]
        products = []
        for part, digit in product(range(self.w.parts), range(self.x.digits)):
            number = first + (part if shares_sum else self.x.digits * part + digit)
            x_offset, w_offset = BLOCK * digit + self.blocks.size * part, self.part_w_bytes * part
            w_offset += self.copy_bytes * digit if self.copies > 1 else 0
            products.append((number, not (shares_sum and digit), x_offset, w_offset))
        return products

    def shift_past(self, part: int) -> int:
        """Return the bytes from a row's scale in a block of QuantBlocks to the row's shift for `part`."""
        return self.x.shifts_at - self.x.scales_at + self._stat_of(part)

    def sum_past(self, part: int) -> int:
        """Return the bytes from a row's scale in a block of QuantBlocks to the row's sum for `part`."""
        return self.x.sums_at - self.x.scales_at + self._stat_of(part)

    def _stat_of(self, part: int) -> int:
        return 0 if self.w.parts == 1 else (1 + part) * self.x.stat_bytes

    @property
    def local(self) -> Regions:
        if not self.has_tiles:
            return Regions({})
        return Regions(
            {
                "config": CONFIG_BYTES,
                "products": self.accumulators * TILE_BYTES,
                "chunk_w": self.chunk_blocks * self.wide_block_bytes if self.w.bits == 4 else 0,
                "sums": self.row_block * SUMS_ROW_BYTES,
            }
        )
