"""Tile sizes of the Triton kernels: a table for each kind of GPU, by the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning
from shortfin_apps.llm.builder.target import Target

SPLIT = 128  # slots that a workgroup takes of a single token's attention
MOST_SPLITS = 64  # workgroups that share such slots; above, each takes a multiple of SPLIT


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A workgroup's tile of a matmul: `rows` tokens by `columns` features, `depth_bytes` of K at a time."""

    rows: int
    columns: int
    depth_bytes: int
    tuning: Tuning

    @property
    def suffix(self) -> str:
        """The end of its kernels' names."""
        return f"{self.rows}x{self.columns}"

    def constexprs(self, item_bytes: int) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth_bytes // item_bytes}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A workgroup's tile of an attention: `queries` by `columns` slots."""

    queries: int
    columns: int
    tuning: Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The tiles of one kind of GPU. `few_tokens` are by the most tokens that they are for."""

    few_tokens: Mapping[int, MatmulTile]
    many_tokens: MatmulTile
    decode_attention: AttentionTile
    attention: AttentionTile

    def matmul(self, tokens: Dim, shape: tuple[int, ...]) -> MatmulTile:
        """The tile for a number of tokens, where a str stands for any, and the shape of a weight."""
        if isinstance(tokens, int):
            for most, tile in self.few_tokens.items():
                if tokens <= most:
                    return tile
        return self.many_tokens


_AMD = TileTable(
    few_tokens={
        16: MatmulTile(16, 32, 128, Tuning(2, 2)),
        32: MatmulTile(32, 32, 128, Tuning(2, 2)),
        64: MatmulTile(64, 32, 128, Tuning(4, 2)),
    },
    many_tokens=MatmulTile(64, 64, 128, Tuning(4, 2)),
    decode_attention=AttentionTile(16, 32, Tuning(4, 2)),
    attention=AttentionTile(64, 64, Tuning(4, 2)),
)
# The quickest of five sets on an H200, for the shapes of an 8B model in bf16.
_NVIDIA = TileTable(
    few_tokens={
        16: MatmulTile(16, 32, 512, Tuning(4, 4)),
        32: MatmulTile(32, 32, 512, Tuning(4, 3)),
        64: MatmulTile(64, 32, 256, Tuning(4, 4)),
    },
    many_tokens=MatmulTile(128, 128, 128, Tuning(8, 3)),
    decode_attention=AttentionTile(16, 128, Tuning(4, 2)),
    attention=AttentionTile(128, 64, Tuning(8, 2)),
)


def tiles_of(target: Target) -> TileTable:
    """The table for a GPU."""
    return _NVIDIA if target.architecture == "nvptx" else _AMD


def fitted(tile: AttentionTile, sharing: int, head_bytes: int) -> AttentionTile:
    """The tile with room for the `sharing` query heads of a K/V head, and fewer slots of wide heads."""
    columns = max(16, min(tile.columns, (16 << 10) // power_of_two(head_bytes)))
    return AttentionTile(max(tile.queries, power_of_two(sharing)), columns, tile.tuning)


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()
