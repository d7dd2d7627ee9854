"""Tile sizes of the Triton kernels, by chip and by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Dim
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Tuning


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A workgroup's tile of a matmul: `rows` tokens by `columns` features, loaded `depth` of K at a time."""

    rows: int
    columns: int
    depth: int
    tuning: Tuning

    @property
    def suffix(self) -> str:
        """Of the names of its kernels."""
        return f"{self.rows}x{self.columns}"

    @property
    def constexprs(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A workgroup's tile of an attention: `queries` by `columns` slots."""

    queries: int
    columns: int
    tuning: Tuning


SPLIT = 256  # slots that a workgroup takes of a decode's attention

_FEW_TOKENS = {
    16: MatmulTile(16, 32, 64, Tuning(2, 2)),
    32: MatmulTile(32, 32, 64, Tuning(2, 2)),
    64: MatmulTile(64, 32, 64, Tuning(4, 2)),
}
_MANY_TOKENS = MatmulTile(64, 64, 64, Tuning(4, 2))


def matmul_tile(tokens: Dim) -> MatmulTile:
    """The tile for a number of tokens, where a str stands for any."""
    if isinstance(tokens, int):
        for most, tile in _FEW_TOKENS.items():
            if tokens <= most:
                return tile
    return _MANY_TOKENS


def decode_attention_tile(sharing: int, head_bytes: int) -> AttentionTile:
    """The tile of one token with the `sharing` query heads of a K/V head, which has `head_bytes`."""
    return AttentionTile(max(16, power_of_two(sharing)), _slots(head_bytes), Tuning(2, 2))


def attention_tile(sharing: int, head_bytes: int) -> AttentionTile:
    """The tile of several tokens with the `sharing` query heads of a K/V head, which has `head_bytes`."""
    return AttentionTile(max(64, power_of_two(sharing)), _slots(head_bytes), Tuning(4, 2))


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()


def _slots(head_bytes: int) -> int:
    """Slots that are loaded at once: keys and values of wide heads would not fit in LDS otherwise."""
    return max(16, min(64, (16 << 10) // power_of_two(head_bytes)))
