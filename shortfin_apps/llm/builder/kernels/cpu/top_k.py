"""Geometry of top_k.mlir.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES


@dataclass(frozen=True, slots=True)
class TopKGeometry:
    """The `k` largest of each row of `size` values."""

    size: int
    k: int

    @property
    def lanes(self) -> int:
        return math.gcd(self.size, LANES)

    @property
    def tile(self) -> int:
        """Values per tile: about sqrt(size).

        A step reads the values of one tile and the best value of every tile, so a tile should have about as
        many values as there are tiles.
        """
        return max(1, round(math.sqrt(self.size) / LANES)) * LANES

    @property
    def tiles(self) -> int:
        return -(-self.size // self.tile)

    @property
    def padded_tiles(self) -> int:
        """The number of tiles, rounded up to whole vectors."""
        return -(-self.tiles // self.lanes) * self.lanes

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("rows",),
            reads={"logits": buffer("f32", "rows", self.size)},
            writes={"values": buffer("f32", "rows", self.k), "indices": buffer("i64", "rows", self.k)},
        )
