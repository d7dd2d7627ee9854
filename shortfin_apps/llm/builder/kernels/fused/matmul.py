"""Geometry of the fused layer's matmuls out[rows, n] = x[rows, k_size] . w[n, k_size]^T.

Defines the part common to all matmuls, and the geometry for weights in blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_BYTES, Int8Blocks, Int8Tiles
from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import tail_sizes
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue, is_gated
from shortfin_apps.llm.builder.kernels.fused.stages import QuantiseBlocksGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.layout import DOT_BYTES, MATRIX_BYTES, PANEL, group_bytes
from shortfin_apps.llm.model.weight_blocks import BLOCK, BlockType

CONFIG_BYTES = 64  # the operand of LDTILECFG
SUMS_ROW_BYTES = 4 * PANEL
_ROW_BLOCK_BYTES = 768 << 10  # rows of a work item, which share the L2 cache with its weights
_MAX_ROWS = 512
_MAX_ITEM_BYTES = 256 << 10  # weights of a work item: about the work lost when the last item finishes late
_MIN_ITEMS = 48


@dataclass(frozen=True, kw_only=True)
class MatmulGeometry(ABC):
    """Sizes common to all matmuls.

    If gated, panels hold 16 columns each of gate and up, and out has n / 2.
    """

    n: int
    k_size: int
    epilogue: Epilogue
    sums_row_bytes: ClassVar[int] = SUMS_ROW_BYTES

    @property
    @abstractmethod
    def panel_bytes(self) -> int:
        """Bytes of the weights of 32 columns."""

    @property
    @abstractmethod
    def local(self) -> Regions:
        """Memory that the function's caller allocates."""

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
        """Bytes per row of x, for the choice of `row_block`."""
        return 2 * self.k_size

    @property
    def row_block(self) -> int:
        """Maximum rows per work item."""
        rows = _ROW_BLOCK_BYTES // self.cached_row_bytes // PANEL * PANEL
        return max(PANEL, min(rows, _MAX_ROWS))

    @property
    def panels_per_item(self) -> int:
        panels = min(self.panels // _MIN_ITEMS, _MAX_ITEM_BYTES // self.panel_bytes)
        # Two gated panels fill a row of a tile, which two workers should not share.
        return max(2, panels // 2 * 2) if self.is_gated else max(1, panels)

    @property
    def column_groups(self) -> int:
        """Groups of `panels_per_item` panels."""
        return -(-self.panels // self.panels_per_item)


@dataclass(frozen=True, kw_only=True)
class MatmulBytesGeometry(MatmulGeometry):
    """int8 with a scale per row and per column, both in AMX tiles and on vectors."""

    @property
    def x(self) -> Int8Tiles:
        return Int8Tiles(self.k_size)

    @property
    def cached_row_bytes(self) -> int:
        return self.x.row_bytes

    @property
    def panel_bytes(self) -> int:
        """Bytes between panels of w; a panel's tiles come in pairs, one for each half."""
        return PANEL * self.cached_row_bytes


@dataclass(frozen=True, kw_only=True)
class MatmulBlockInt8Geometry(MatmulGeometry):
    """Weights in `blocks` of 16 or 32 (matmul_block_int8_function.mlir.j2); x has blocks of 32.

    A part is the overlap of a weight block and an x block: the full x block, or half of it. With AMX, vectors
    are wide, and instructions exist that round to bf16 and that multiply unsigned by signed bytes.
    `has_neon`: NEON vectors, with signed byte dot products if `has_dot`. `pair`: neighbours along K stored
    together in w.
    """

    blocks: BlockType
    pair: int = DOT_BYTES
    has_tiles: bool = True
    has_bf16: bool = True
    has_wide_vectors: bool = True
    has_dot: bool = True
    has_neon: bool = False
    max_chunk_blocks: ClassVar[int] = 20  # blocks of a panel along K that stay in the L1 cache

    @property
    def x(self) -> Int8Blocks:
        return Int8Blocks(self.k_size)

    @property
    def quantise(self) -> QuantiseBlocksGeometry:
        """The quantisation of `out`, if gated."""
        return QuantiseBlocksGeometry(
            self.out_features, is_tiled=False, has_wide_vectors=self.has_wide_vectors, has_neon=self.has_neon
        )

    @property
    def has_smmla(self) -> bool:
        """Whether w is packed for NEON's matrix products."""
        return self.pair == MATRIX_BYTES

    @property
    def has_signs(self) -> bool:
        """Whether weights may be negative."""
        return self.blocks.bits == 8

    @property
    def is_shifted(self) -> bool:
        """Whether vectors read weights as unsigned q + 128."""
        return self.has_signs and self.has_dot and not self.has_neon

    @property
    def tile_rows(self) -> int:
        """Rows per vector tile.

        Each row has two sums and two products, in 32 registers, or in 16 of half the width.
        """
        return 8 if self.has_wide_vectors else 2

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Row counts of the smaller tiles for the remainder: the binary digits of its row count."""
        return tail_sizes(self.tile_rows)

    @property
    def parts(self) -> int:
        """Parts per block of x."""
        return BLOCK // self.blocks.size

    @property
    def paired_blocks(self) -> int:
        """Blocks of K, without an odd one at its end."""
        return self.x.blocks // 2 * 2

    @property
    def chunk_blocks(self) -> int:
        """Blocks per chunk: near-equal chunks of K with an even number of blocks."""
        pairs = self.x.blocks // 2
        chunks = max(1, -(-2 * pairs // self.max_chunk_blocks))
        return 2 * max(1, -(-pairs // chunks))

    @property
    def block_bytes(self) -> int:
        """Bytes of the quants of a block of 32 columns."""
        return PANEL * BLOCK * self.blocks.bits // 8

    @property
    def part_w_bytes(self) -> int:
        """Bytes of the quants of a part of 32 columns, one byte each."""
        return PANEL * self.blocks.size

    @property
    def panel_bytes(self) -> int:
        return PANEL * self.k_size * self.blocks.bits // 8

    @property
    def own_terms_bytes(self) -> int:
        """Bytes of a part's own terms, for 32 columns: f16, or i8 in groups."""
        return PANEL * self.blocks.num_terms * (1 if self.blocks.group else 2)

    @property
    def group_parts(self) -> int:
        """Parts that share an f16 per term."""
        assert self.blocks.group is not None
        return self.blocks.group // self.blocks.size

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's terms, for 32 columns: the shared f16, then each part's own."""
        return group_bytes(self.blocks)

    @property
    def group_head_bytes(self) -> int:
        """Bytes of the f16 terms shared by a group."""
        return self.group_bytes - self.group_parts * self.own_terms_bytes

    def shift_past(self, part: int) -> int:
        """Return the bytes from a row's scale of a block to its shift of a part."""
        return self.x.shifts_at - self.x.scales_at + self._stat_of(part)

    def sum_past(self, part: int) -> int:
        """Return the bytes from a row's scale of a block to its sum of a part."""
        return self.x.sums_at - self.x.scales_at + self._stat_of(part)

    def _stat_of(self, part: int) -> int:
        return 0 if self.parts == 1 else (1 + part) * self.x.stat_bytes

    @property
    def panel_terms_bytes(self) -> int:
        if self.blocks.group is None:
            return self.x.blocks * self.terms_bytes
        return self.k_size // self.blocks.group * self.group_bytes

    @property
    def terms_bytes(self) -> int:
        """Bytes of the terms per block of x, for 32 columns; in groups their average, rounded down."""
        if self.blocks.group is None:
            return self.parts * self.own_terms_bytes
        return BLOCK * self.group_bytes // self.blocks.group

    @property
    def local(self) -> Regions:
        if not self.has_tiles:
            return Regions({})
        return Regions(
            {
                "config": CONFIG_BYTES,
                "products": self.parts * TILE_BYTES,
                "chunk_w": self.chunk_blocks * TILE_BYTES if self.blocks.bits == 4 else 0,
                "sums": self.row_block * SUMS_ROW_BYTES,
            }
        )
