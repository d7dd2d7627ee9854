"""Tile sizes of the Triton kernels: a table for each kind of GPU, by tokens and by a weight's shape."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shortfin_apps.llm.builder.graph.emitter import Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.kernels.triton import FP8_GROUP
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import BlockRows, Fp8Rows, WeightLayout

MOST_SPLITS = 64  # maximum workgroups per K/V head for a single token's attention
_ANY = sys.maxsize
_LEAST_DEPTH_BYTES = 64  # a block of weights, widened to 16 bits; one matrix instruction takes no more of K
_UNKNOWN_TOKENS = 512  # assumed if the number of tokens is unknown at compile time


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A workgroup's tile of a matmul: `rows` tokens by `columns` features, `depth_bytes` of K at a time.

    `early`: load the norm's inputs before the product, if there are registers for them.
    """

    rows: int
    columns: int
    depth_bytes: int
    tuning: Tuning
    early: bool = True

    @property
    def suffix(self) -> str:
        """The suffix of kernel names."""
        return f"{self.rows}x{self.columns}x{self.depth_bytes}"

    def with_columns(self, least: int) -> MatmulTile:
        """Return a tile with at least `least` columns that uses as much shared memory."""
        columns = max(self.columns, least)
        depth_bytes = max(_LEAST_DEPTH_BYTES, self.depth_bytes * self.columns // columns)
        return replace(self, columns=columns, depth_bytes=depth_bytes)

    def for_blocks(self) -> MatmulTile:
        """Return the tile for weights in blocks, which take registers while they are widened."""
        columns = self.columns if self.rows < 128 else min(self.columns, 128)
        return replace(self, columns=columns, early=self.early and self.rows <= 16)

    def for_fp8(self) -> MatmulTile:
        """Return the tile for a product in 8-bit floats, which keeps a second tile of sums in registers."""
        tuning = Tuning(self.tuning.num_waves, min(self.tuning.num_stages, 3))
        return MatmulTile(self.rows, min(self.columns, 128), FP8_GROUP, tuning, self.rows <= 16)

    def constexprs(self, item_bytes: int) -> dict[str, int]:
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth_bytes // item_bytes}
        return {**sizes, "EARLY": self.early}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A workgroup's tile of attention: `queries` by `columns` slots, fewer if their keys are too large."""

    queries: int
    columns: int
    tuning: Tuning
    most_key_bytes: int = 16 << 10


@dataclass(frozen=True, slots=True)
class Use:
    """A tile for matmuls of up to `tokens` tokens and weights of up to `features` output features."""

    tokens: int
    features: int
    tile: MatmulTile


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The tiles of one kind of GPU; the first matching entry of `matmuls` is used.

    `blocks` and `fp8` hold tiles for weights in blocks and in 8-bit floats; if empty, they derive from
    `matmuls`. `float4_experts` holds tiles for experts in 4-bit floats, by average rows per expert. `split`
    is the number of slots per workgroup in a single token's attention, or the smallest multiple of it with
    which MOST_SPLITS workgroups suffice.
    """

    matmuls: Sequence[Use]
    blocks: Sequence[Use] = ()
    fp8: Sequence[Use] = ()
    float4_experts: Sequence[Use] = ()
    split: int = 128
    decode_attention: AttentionTile
    attention: AttentionTile

    def matmul(self, tokens: Dim, shape: tuple[int, ...], layout: WeightLayout | None = None) -> MatmulTile:
        """Return the tile for a number of tokens (a str: unknown) and the shape and layout of a weight.

        The default layout is row-major floats.
        """
        known = tokens if isinstance(tokens, int) else _UNKNOWN_TOKENS

        def first(uses: Sequence[Use]) -> MatmulTile:
            return next(use.tile for use in uses if known <= use.tokens and shape[0] <= use.features)

        match layout:
            case Fp8Rows():
                return first(self.fp8) if self.fp8 else first(self.matmuls).for_fp8()
            case BlockRows():
                return first(self.blocks) if self.blocks else first(self.matmuls).for_blocks()
        return first(self.matmuls)

    def float4_expert(self, rows: int) -> MatmulTile | None:
        """Return the tile from `float4_experts`; None if these experts use the tiles of other weights."""
        return next((use.tile for use in self.float4_experts if rows <= use.tokens), None)


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
# The fastest of five sets on an H200 that need less shared memory than _HOPPER's.
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
# The fastest on an H200, or close to it, among bench/matmul_candidates.py, for the shapes of Llama 3.1 8B and
# SmolLM2-135M in bf16 (bench/tune_matmul.py); for attention, among the tiles in bench/tune_attention.py.
_HOPPER = TileTable(
    matmuls=(
        Use(16, 2048, MatmulTile(16, 16, 512, Tuning(2, 6))),
        Use(16, 3584, MatmulTile(16, 32, 256, Tuning(2, 6))),
        Use(16, 5120, MatmulTile(16, 32, 512, Tuning(4, 6))),
        Use(16, 8192, MatmulTile(16, 32, 256, Tuning(2, 6))),
        Use(16, _ANY, MatmulTile(16, 128, 256, Tuning(4, 4))),
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
    blocks=(
        Use(16, 5120, MatmulTile(16, 32, 512, Tuning(4, 4))),
        Use(16, 8192, MatmulTile(16, 64, 512, Tuning(4, 4))),
        Use(16, _ANY, MatmulTile(16, 128, 512, Tuning(4, 3))),
        Use(32, 5120, MatmulTile(16, 64, 512, Tuning(4, 4))),
        Use(32, 8192, MatmulTile(32, 64, 512, Tuning(4, 4))),
        Use(32, _ANY, MatmulTile(32, 128, 256, Tuning(4, 4))),
        Use(64, 5120, MatmulTile(32, 64, 512, Tuning(4, 4))),
        Use(64, 8192, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(64, _ANY, MatmulTile(64, 128, 128, Tuning(4, 4))),
        Use(128, 5120, MatmulTile(64, 64, 256, Tuning(4, 6))),
        Use(_ANY, _ANY, MatmulTile(128, 64, 128, Tuning(4, 4))),
    ),
    fp8=(
        Use(16, 5120, MatmulTile(16, 32, 512, Tuning(4, 3))),
        Use(16, 8192, MatmulTile(16, 64, 512, Tuning(4, 3))),
        Use(16, _ANY, MatmulTile(16, 128, 128, Tuning(4, 4))),
        Use(32, 8192, MatmulTile(16, 64, 512, Tuning(4, 3))),
        Use(32, _ANY, MatmulTile(32, 128, 256, Tuning(4, 3))),
        Use(64, 8192, MatmulTile(64, 64, 128, Tuning(4, 6))),
        Use(64, _ANY, MatmulTile(64, 128, 128, Tuning(4, 3))),
        Use(128, 8192, MatmulTile(64, 64, 128, Tuning(4, 6))),
        Use(_ANY, _ANY, MatmulTile(128, 128, 128, Tuning(8, 4))),
    ),
    # For gpt-oss-20b's shape (bench/tune_experts.py).
    float4_experts=(
        Use(8, _ANY, MatmulTile(16, 64, 256, Tuning(4, 6))),
        Use(16, _ANY, MatmulTile(32, 128, 256, Tuning(4, 4))),
        Use(48, _ANY, MatmulTile(64, 128, 128, Tuning(4, 4))),
        Use(_ANY, _ANY, MatmulTile(128, 128, 128, Tuning(4, 4))),
    ),
    split=256,
    decode_attention=AttentionTile(16, 128, Tuning(4, 2), most_key_bytes=32 << 10),
    attention=AttentionTile(64, 128, Tuning(4, 3)),
)


def tiles_of(target: Target) -> TileTable:
    """Return the table for a GPU."""
    if target.architecture != "nvptx":
        return _RDNA3 if target.cpu.startswith("gfx11") else _CDNA4 if target.cpu == "gfx950" else _AMD
    return _HOPPER if target.cpu.startswith("sm_90") else _NVIDIA


def fitted(tile: AttentionTile, sharing: int, head_bytes: int) -> AttentionTile:
    """Fit the tile to the `sharing` query heads of a K/V head, with fewer slots for wide heads."""
    columns = max(16, min(tile.columns, tile.most_key_bytes // power_of_two(head_bytes)))
    return replace(tile, queries=max(tile.queries, power_of_two(sharing)), columns=columns)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
