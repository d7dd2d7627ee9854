"""Memory that a kernel divides into contiguous named regions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Regions:
    """Named sizes of contiguous regions."""

    sizes: dict[str, int]

    @property
    def offsets(self) -> dict[str, int]:
        return dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())
