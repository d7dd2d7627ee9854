"""Tile sizes of the Triton kernels: a table per kind of GPU, by number of tokens and shape of the weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shortfin_apps.llm.builder.graph.emitter import Dim, room
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP, PART_DEPTH
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, RowMajor, WeightLayout
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS

FEW_ROWS = 32  # up to this size, attention in decodes gives a row the same bits, whatever their size
MOST_SPLITS = 64  # maximum workgroups per K/V head for the attention of a single token
_ANY = sys.maxsize
_LEAST_PART_BYTES = 2 * PART_DEPTH  # in 16 bits
LOADED_BYTES = 160 << 10  # of shared memory, of which a multiprocessor of Hopper has 228 KiB
_LEAST_DEPTH_BYTES = 64  # one block of 32 weights in 16 bits; no matrix instruction reads more of K
_BLOCK_SUMS = 64 * 256  # of a tile; with weights in blocks, more do not fit in registers
_PART_SUMS = 16 * 128  # and of a wave, if each has a part of K
_LEAST_ROWS = 8  # of a matrix instruction
UNKNOWN_TOKENS = 512  # the assumption if the number of tokens is unknown at compile time


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A workgroup's tile of a matmul: `rows` tokens by `columns` output features.

    `depth_bytes`: bytes of K per step; `early`: load the inputs of a deferred norm before the product, which
    needs registers; `parts`: parts of K, each of which a wave multiplies, or 1 if waves divide the columns
    (`product` in kernels/triton/product.py).
    """

    rows: int
    columns: int
    depth_bytes: int
    tuning: Tuning
    early: bool = True
    parts: int = 1

    @property
    def suffix(self) -> str:
        """A suffix for the names of kernels."""
        most = self.tuning.max_registers
        return f"{self.rows}x{self.columns}x{self.depth_bytes}" + (f"r{most}" if most else "")

    def with_columns(self, least: int) -> MatmulTile:
        """Return the tile with at least `least` columns, and less depth, to use the same shared memory."""
        columns = max(self.columns, least)
        least_bytes = _LEAST_DEPTH_BYTES if self.parts == 1 else _LEAST_PART_BYTES * self.parts
        depth_bytes = max(least_bytes, self.depth_bytes * self.columns // columns)
        return replace(self, columns=columns, depth_bytes=depth_bytes)

    def with_stages(self, most: int, loaded_bytes: int) -> MatmulTile:
        """Return the tile with `most` pipeline stages, or down to 2 if their loads exceed `loaded_bytes`.

        Weights count as floats.
        """
        step = (self.rows + self.columns) * self.depth_bytes
        stages = min(most, max(2, 1 + loaded_bytes // step))
        return replace(self, tuning=replace(self.tuning, num_stages=stages))

    def for_blocks(self) -> MatmulTile:
        """Return the tile for weights in blocks, whose dequantisation needs registers."""
        columns = self.columns if self.rows < 128 else min(self.columns, 128)
        return replace(self, columns=columns, early=self.early and self.rows <= 16)

    def for_wide_blocks(self) -> MatmulTile:
        """Return a tile that got more columns, with weights in blocks, whose sums fit in registers."""
        most_rows = max(_LEAST_ROWS, (_BLOCK_SUMS if self.parts == 1 else _PART_SUMS) // self.columns)
        tuning = replace(self.tuning, max_registers=None)  # the limit was for fewer columns
        return replace(self, rows=min(self.rows, most_rows), tuning=tuning)

    def for_fp8(self) -> MatmulTile:
        """Return the tile for 8-bit floats, where the kernel keeps a second tile of sums in registers."""
        tuning = Tuning(self.tuning.num_waves, min(self.tuning.num_stages, 3))
        return MatmulTile(self.rows, min(self.columns, 128), FP8_GROUP, tuning, self.rows <= 16)

    def constexprs(self, item_bytes: int) -> dict[str, int]:
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth_bytes // item_bytes}
        return {**sizes, "EARLY": self.early, "PARTS": self.parts}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A workgroup's tile of attention: `queries` (token, head) pairs by `columns` slots per step.

    `most_key_bytes`: maximum bytes of the keys of a step; `fitted` reduces `columns` accordingly.
    """

    queries: int
    columns: int
    tuning: Tuning
    most_key_bytes: int = 16 << 10


@dataclass(frozen=True, slots=True)
class Use:
    """A tile for matmuls with at most `tokens` tokens and weights with at most `features` output features."""

    tokens: int
    features: int
    tile: MatmulTile


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The tiles of one kind of GPU; of each list, the first matching item is used.

    `matmuls`: for weights in floats; `blocks` and `fp8`: for weights in blocks and in 8-bit floats (empty:
    derived from `matmuls`); `byte_blocks`, `bf16_byte_blocks` and `bf16_blocks`: before `blocks`, for blocks
    of 8 bits, and for those of 8 and of 4 with scales in bf16 (`BlockRows.terms_in_bf16`); `float4_experts`:
    for experts in 4-bit floats, where `Use.tokens` means average rows per expert; `split`: slots per
    workgroup in the attention of a single token. A longer context than MOST_SPLITS * `split` uses a multiple
    of `split`.
    `batch_attention` and `batch_split` replace `decode_attention` and `split` for more than FEW_ROWS rows.
    """

    matmuls: Sequence[Use]
    byte_blocks: Sequence[Use] = ()
    bf16_byte_blocks: Sequence[Use] = ()
    bf16_blocks: Sequence[Use] = ()
    blocks: Sequence[Use] = ()
    fp8: Sequence[Use] = ()
    float4_experts: Sequence[Use] = ()
    split: int = 128
    decode_attention: AttentionTile
    attention: AttentionTile
    batch_attention: AttentionTile | None = None
    batch_split: int = 128

    def for_rows(self, rows: Dim) -> TileTable:
        """Return the table for attention of a batch's single tokens; a str means that `rows` is unknown.

        Then, the tile is that of many rows, and the split that of few, which may have long contexts.
        """
        if self.batch_attention is None or not may_be_many(rows):
            return self
        split = self.batch_split if isinstance(rows, int) else self.split
        return replace(self, decode_attention=self.batch_attention, split=split)

    def matmul(self, tokens: Dim, shape: tuple[int, ...], layout: WeightLayout | None = None) -> MatmulTile:
        """Return the tile for a number of tokens, and the shape and layout of a weight.

        `tokens`: a str means that the number is unknown; `layout`: None means row-major floats.
        """
        known = tokens if isinstance(tokens, int) else UNKNOWN_TOKENS

        def first(*uses: Use) -> MatmulTile:
            return next(use.tile for use in uses if known <= use.tokens and shape[0] <= use.features)

        match layout:
            case Fp8Rows():
                return first(*self.fp8) if self.fp8 else first(*self.matmuls).for_fp8()
            case BlockRows(blocks, terms_in_bf16) if self.blocks:
                own = {
                    (8, False): self.byte_blocks,
                    (8, True): self.bf16_byte_blocks,
                    (4, True): self.bf16_blocks,
                }.get((blocks.bits, terms_in_bf16), ())
                return first(*own, *self.blocks)
            case BlockRows():
                return first(*self.matmuls).for_blocks()
            case RowMajor("f32"):  # which is too wide for parts of K
                return first(*(use for use in self.matmuls if use.tile.parts == 1))
        return first(*self.matmuls)

    def float4_expert(self, rows: int) -> MatmulTile | None:
        """Return the tile for `rows` per expert from `float4_experts`; None if this table is empty."""
        return next((use.tile for use in self.float4_experts if rows <= use.tokens), None)


@dataclass(frozen=True, slots=True)
class OneLaunchTiles:
    """The tiles of a decode as one launch. All stages have the same waves and, in floats, `depth_bytes`.

    `programs`: maximum number of workgroups, all of which must be resident at the same time. `per_unit`: of
    these on each compute unit. `separate`: the tiles of separate launches, whose matmuls divide K into the
    same number of parts. `loaded_bytes`: shared memory for what a matmul loads ahead.
    """

    programs: int
    depth_bytes: int
    tuning: Tuning
    separate: TileTable
    per_unit: int = 1
    loaded_bytes: int = LOADED_BYTES

    @property
    def most_shared_bytes(self) -> int | None:
        """Shared memory that a workgroup may have, if a compute unit has to run several.

        Hopper's multiprocessors have 228 KiB, of which the driver takes 1 KiB for each workgroup. Registers
        always suffice for two workgroups of four warps.
        """
        return None if self.per_unit == 1 else (228 << 10) // self.per_unit - (1 << 10)

    def matmul(self, tokens: Dim, shape: tuple[int, ...], layout: WeightLayout | None = None) -> MatmulTile:
        """Return the tile with which the workgroup that has the most columns has the fewest.

        The tile includes all `tokens`; their number must be known.
        """
        assert isinstance(tokens, int)

        def most_columns(columns: int) -> int:
            tiles = -(-shape[0] // columns)
            return -(-tiles // self.programs) * columns

        columns = min((64, 32, 16), key=most_columns)  # of equal ones the widest
        parts = self.separate.matmul(tokens, shape, layout).parts
        rows = max(16 if parts == 1 else _LEAST_ROWS, power_of_two(tokens))
        tile = MatmulTile(rows, columns, self.depth_bytes, self.tuning, parts=parts)
        if parts == 1:
            return tile.with_stages(self.tuning.num_stages, self.loaded_bytes)
        if isinstance(layout, BlockRows):
            narrow = replace(tile, columns=16, depth_bytes=2 * self.depth_bytes)
            return narrow.with_columns(min(columns, 32)).with_stages(5, self.loaded_bytes)
        if isinstance(layout, Fp8Rows):
            # 16 columns are faster only as a workgroup's single tile.
            least = 16 if shape[0] <= 16 * self.programs else 32
            return replace(tile, columns=max(columns, least)).with_stages(4, self.loaded_bytes)
        return tile.with_stages(8, self.loaded_bytes)


_AMD = TileTable(
    matmuls=(
        Use(16, _ANY, MatmulTile(16, 32, 128, Tuning(2, 2))),
        Use(32, _ANY, MatmulTile(32, 32, 128, Tuning(2, 2))),
        Use(64, _ANY, MatmulTile(64, 32, 128, Tuning(4, 2))),
        Use(_ANY, _ANY, MatmulTile(64, 64, 128, Tuning(4, 2), early=False)),
    ),
    decode_attention=AttentionTile(16, 32, Tuning(4, 2)),
    attention=AttentionTile(64, 64, Tuning(4, 2)),
)
# Triton 3.9 miscompiles attention's pipelined loads on CDNA4: they read LDS before it is written.
_CDNA4 = replace(
    _AMD,
    decode_attention=replace(_AMD.decode_attention, tuning=Tuning(4, 1)),
    attention=replace(_AMD.attention, tuning=Tuning(4, 1)),
)
# With wider tiles, 8-bit block weights spill registers on RDNA3.
_RDNA3 = replace(
    _AMD,
    blocks=(
        Use(16, _ANY, _AMD.matmuls[0].tile.for_blocks()),
        Use(32, _ANY, _AMD.matmuls[1].tile.for_blocks()),
        Use(_ANY, _ANY, _AMD.matmuls[2].tile.for_blocks()),
    ),
)
# The fastest on an H200 of five sets of tiles that need less shared memory than _HOPPER's.
_NVIDIA = TileTable(
    matmuls=(
        Use(16, _ANY, MatmulTile(16, 32, 512, Tuning(4, 4))),
        Use(32, _ANY, MatmulTile(32, 32, 512, Tuning(4, 3))),
        Use(64, _ANY, MatmulTile(64, 32, 256, Tuning(4, 4))),
        Use(_ANY, _ANY, MatmulTile(128, 128, 128, Tuning(8, 3))),
    ),
    decode_attention=AttentionTile(16, 128, Tuning(4, 2)),
    attention=AttentionTile(128, 64, Tuning(8, 2)),
)
# The fastest tiles, or nearly so, on an H200 with the shapes of Llama 3.1 8B and SmolLM2-135M in bf16: among
# those in bench/matmul_candidates.py (measured by bench/tune_matmul.py) and, for attention, among those in
# bench/tune_attention.py.
_HOPPER = TileTable(
    matmuls=(
        # Up to 16 tokens, all add in the same order, as all have four parts.
        Use(8, 8192, MatmulTile(8, 16, 512, Tuning(4, 6), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 1024, Tuning(4, 3), parts=4)),
        Use(16, 2048, MatmulTile(8, 16, 512, Tuning(4, 6), parts=4)),
        Use(16, _ANY, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, 2048, MatmulTile(16, 16, 512, Tuning(2, 6))),
        Use(32, 3584, MatmulTile(32, 32, 256, Tuning(4, 6))),
        Use(32, 5120, MatmulTile(32, 32, 512, Tuning(4, 5))),
        Use(32, 8192, MatmulTile(32, 64, 512, Tuning(4, 4))),
        Use(32, _ANY, MatmulTile(32, 128, 256, Tuning(4, 4))),
        Use(64, 2048, MatmulTile(16, 32, 256, Tuning(2, 6))),
        Use(64, 5120, MatmulTile(64, 32, 256, Tuning(4, 6))),
        Use(64, 8192, MatmulTile(64, 64, 256, Tuning(4, 5))),
        Use(64, _ANY, MatmulTile(64, 128, 128, Tuning(4, 4))),
        Use(128, 2048, MatmulTile(32, 32, 256, Tuning(4, 6))),
        Use(128, 5120, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(128, 8192, MatmulTile(64, 64, 128, Tuning(4, 6))),
        Use(128, _ANY, MatmulTile(128, 256, 128, Tuning(8, 4))),
        Use(512, 2048, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(512, 3584, MatmulTile(64, 64, 128, Tuning(4, 4))),
        Use(512, 5120, MatmulTile(128, 128, 128, Tuning(8, 4))),
        Use(_ANY, 3584, MatmulTile(128, 128, 128, Tuning(8, 4))),
        Use(_ANY, _ANY, MatmulTile(128, 256, 128, Tuning(8, 4))),
    ),
    # Up to 32 tokens, all add in the same order, as all have four parts.
    byte_blocks=(
        Use(8, 8192, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, 5120, MatmulTile(16, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, _ANY, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, _ANY, MatmulTile(32, 32, 512, Tuning(4, 4), parts=4)),
    ),
    bf16_byte_blocks=(
        Use(8, 8192, MatmulTile(8, 16, 1024, Tuning(4, 4, max_registers=96), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 512, Tuning(4, 5, max_registers=128), parts=4)),
        Use(32, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, 5120, MatmulTile(16, 32, 512, Tuning(4, 5, max_registers=128), parts=4)),
        Use(16, _ANY, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, _ANY, MatmulTile(32, 32, 512, Tuning(4, 4), parts=4)),
    ),
    bf16_blocks=(
        Use(8, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(8, 3584, MatmulTile(8, 32, 512, Tuning(4, 5), parts=4)),
        Use(8, 5120, MatmulTile(8, 16, 1024, Tuning(4, 4, max_registers=96), parts=4)),
        Use(8, 8192, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 1024, Tuning(4, 3, max_registers=112), parts=4)),
        Use(32, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, 3584, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(16, 5120, MatmulTile(16, 32, 512, Tuning(4, 5, max_registers=128), parts=4)),
        Use(16, 8192, MatmulTile(16, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, _ANY, MatmulTile(16, 128, 512, Tuning(4, 3), parts=4)),
        Use(32, 3584, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, 8192, MatmulTile(32, 32, 512, Tuning(4, 4), parts=4)),
        Use(32, _ANY, MatmulTile(32, 64, 512, Tuning(4, 3), parts=4)),
        Use(64, 2048, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(64, 3584, MatmulTile(32, 64, 512, Tuning(4, 4))),
        Use(64, 8192, MatmulTile(32, 32, 512, Tuning(4, 4, max_registers=168), parts=4)),
    ),
    blocks=(
        Use(8, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(8, 3584, MatmulTile(8, 32, 512, Tuning(4, 5), parts=4)),
        Use(8, 5120, MatmulTile(8, 32, 1024, Tuning(4, 4), parts=4)),
        Use(8, 8192, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, 2048, MatmulTile(8, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, 3584, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(16, 8192, MatmulTile(16, 16, 1024, Tuning(4, 3), parts=4)),
        Use(16, _ANY, MatmulTile(16, 128, 512, Tuning(4, 3), parts=4)),
        Use(32, 3584, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(32, 5120, MatmulTile(32, 32, 512, Tuning(4, 4), parts=4)),
        Use(32, _ANY, MatmulTile(32, 64, 512, Tuning(4, 3), parts=4)),
        Use(128, 2048, MatmulTile(16, 32, 512, Tuning(4, 5), parts=4)),
        Use(64, 3584, MatmulTile(32, 64, 512, Tuning(4, 4))),
        Use(64, 5120, MatmulTile(64, 32, 512, Tuning(4, 3), parts=4)),
        Use(64, 8192, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(64, _ANY, MatmulTile(64, 128, 128, Tuning(4, 4))),
        Use(128, 5120, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(_ANY, _ANY, MatmulTile(128, 64, 128, Tuning(4, 4))),
    ),
    fp8=(
        Use(8, 8192, MatmulTile(8, 16, 512, Tuning(4, 4), parts=4)),
        Use(8, _ANY, MatmulTile(8, 32, 512, Tuning(4, 3), parts=4)),  # parts are for one launch
        Use(32, 2048, MatmulTile(8, 16, 512, Tuning(4, 4), parts=4)),
        Use(16, 8192, MatmulTile(16, 16, 512, Tuning(4, 5), parts=4)),
        Use(16, _ANY, MatmulTile(16, 128, 128, Tuning(4, 4))),
        Use(32, 3584, MatmulTile(16, 64, 512, Tuning(4, 3))),
        Use(32, 8192, MatmulTile(16, 32, 512, Tuning(4, 4), parts=4)),
        Use(32, _ANY, MatmulTile(32, 128, 256, Tuning(4, 3))),
        Use(64, 2048, MatmulTile(16, 32, 512, Tuning(4, 4), parts=4)),
        Use(64, 8192, MatmulTile(64, 64, 128, Tuning(4, 6))),
        Use(64, _ANY, MatmulTile(64, 128, 128, Tuning(4, 3))),
        Use(128, 8192, MatmulTile(64, 64, 128, Tuning(4, 6))),
        Use(_ANY, _ANY, MatmulTile(128, 128, 128, Tuning(8, 4))),
    ),
    # For gpt-oss-20b's shape (bench/tune_experts.py).
    float4_experts=(
        # With one row of each expert on average, hardly any has more than eight.
        Use(1, _ANY, MatmulTile(8, 32, 512, Tuning(4, 5, max_registers=112), parts=4)),
        Use(8, _ANY, MatmulTile(16, 64, 256, Tuning(4, 6))),
        Use(16, _ANY, MatmulTile(32, 128, 256, Tuning(4, 4))),
        Use(48, _ANY, MatmulTile(64, 128, 128, Tuning(4, 4))),
        Use(_ANY, _ANY, MatmulTile(128, 128, 128, Tuning(4, 4))),
    ),
    split=256,
    decode_attention=AttentionTile(16, 128, Tuning(4, 2), most_key_bytes=32 << 10),
    batch_split=1024,
    batch_attention=AttentionTile(16, 64, Tuning(2, 5)),
    attention=AttentionTile(64, 128, Tuning(4, 3)),
)

# Compute units for one launch: the multiprocessors of an H100 SXM or H200. With 114, as an H100 PCIe has, a
# 1B model took 1.25 times as long.
_HOPPER_UNITS, _NVIDIA_UNITS = 132, 16


def may_be_many(rows: Dim) -> bool:
    """Whether a batch may have more than FEW_ROWS rows; a str means that their number is unknown."""
    most = room(rows)
    return isinstance(most, str) or most > FEW_ROWS


def tiles_of(target: Target) -> TileTable:
    """Return the table for the target GPU."""
    if target.architecture != "nvptx":
        return _RDNA3 if target.cpu.startswith("gfx11") else _CDNA4 if target.cpu == "gfx950" else _AMD
    return _HOPPER if target.cpu.startswith("sm_90") else _NVIDIA


def one_launch_tiles(target: Target, per_unit: int = 1) -> OneLaunchTiles:
    """Return the tiles of a decode as one launch on the target GPU.

    `per_unit`: workgroups that share a multiprocessor of a Hopper GPU, on which one multiplies while another
    waits.
    """
    tiles = tiles_of(target)
    if tiles is _HOPPER:
        programs, loaded_bytes = _HOPPER_UNITS * per_unit, LOADED_BYTES // per_unit
        return OneLaunchTiles(programs, 512, Tuning(4, 4), tiles, per_unit, loaded_bytes)
    if target.architecture == "nvptx":
        return OneLaunchTiles(_NVIDIA_UNITS, 512, Tuning(4, 4), tiles)
    # All stages have the number of pipeline stages that attention takes (see _CDNA4).
    tuning = Tuning(4, tiles.decode_attention.tuning.num_stages)
    return OneLaunchTiles(CHIPS[target.cpu].units, 128, tuning, tiles)


def fitted(tile: AttentionTile, sharing: int, head_bytes: int) -> AttentionTile:
    """Return the tile with at least `sharing` queries, and with fewer columns for wide heads.

    `sharing`: query heads per K/V head; `head_bytes`: bytes of a head's key.
    """
    columns = max(16, min(tile.columns, tile.most_key_bytes // power_of_two(head_bytes)))
    return replace(tile, queries=max(tile.queries, power_of_two(sharing)), columns=columns)


def latent_groups(heads: int) -> int:
    """Return the number of groups of query heads in latent attention, with at most 16 heads each."""
    return next(groups for groups in range(-(-heads // 16), heads + 1) if heads % groups == 0)


def latent_tiles(target: Target, tiles: TileTable) -> TileTable:
    """Return the table for latent attention, whose keys are wide: a step of 16 slots takes 18 KiB in bf16.

    AMD's 64 KiB of shared memory have no room for a second step in f32.
    """
    tuning = Tuning(8, 2) if target.architecture == "nvptx" else Tuning(4, 1)
    return replace(
        tiles,
        decode_attention=replace(tiles.decode_attention, queries=16, tuning=tuning),
        attention=replace(tiles.attention, queries=32, tuning=tuning),
    )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
