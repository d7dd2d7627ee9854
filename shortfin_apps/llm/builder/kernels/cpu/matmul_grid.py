"""Work split of the vector matmuls; see matmul_grid.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    """A workgroup computes up to `panels_per_group` panels and `row_block` rows, in tiles of `tile_rows`."""

    panels: int
    panels_per_group: int
    row_block: int
    tile_rows: int

    @property
    def column_groups(self) -> int:
        return -(-self.panels // self.panels_per_group)

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Rows of each of the smaller tiles for the remaining rows: descending powers of two."""
        return tail_sizes(self.tile_rows)


def tail_sizes(tile_rows: int) -> tuple[int, ...]:
    """Return descending powers of two, of which some add up to each number of rows below `tile_rows`."""
    return tuple(1 << bit for bit in reversed(range((tile_rows - 1).bit_length())))
