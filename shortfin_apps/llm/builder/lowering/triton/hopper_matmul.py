"""The choice of the form for Hopper of a matmul of many tokens (kernels/triton/hopper_matmul.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.triton import hopper_matmul, linear, qkv
from shortfin_apps.llm.builder.lowering.triton.loads_by_tma import (
    PROGRAMS,
    is_plain,
    shape_of,
    with_loads_by_tma,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import UNKNOWN_TOKENS

ROWS = 128  # of a tile: two groups of warps with 64 each, the rows of one matrix instruction
_LEAST_TOKENS = 256  # fewer were not measured
_MAPS_BYTES = 256  # of a workgroup: the tensor maps of x and w
_IN_MULTIPLE = 512  # whole loads of partial sums of squares (SUMMED_AT_ONCE in hopper_product.py)
_FORMS = {
    linear.linear: hopper_matmul.linear,
    linear.gated_linear: hopper_matmul.gated_linear,
    qkv.project_qkv: hopper_matmul.project_qkv,
}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of ROWS tokens by `columns` rows of the weight; `stages`: loads of K in flight."""

    columns: int
    stages: int


# The fastest on an H200 with the shapes of Llama 3.1 8B (bench/tune_matmul.py), widest first. In 8-bit
# floats, wider tiles lack registers for a second tile of sums.
_TILES = {"bf16": (HopperTile(256, 4), HopperTile(128, 6)), "f8E4M3FN": (HopperTile(128, 6),)}


def hopper_form(kernel: Kernel, tokens: Dim | Tensor | None) -> Kernel:
    """Return the form for Hopper of a matmul of `tokens`; `kernel` itself if that may be faster.

    Both forms return equal bits (see hopper_product.py), so the choice changes no result. `kernel` must be
    without its absent operands.
    """
    tile = hopper_tile(kernel, tokens)
    return kernel if tile is None else with_tile(kernel, tile)


def hopper_tile(kernel: Kernel, tokens: Dim | Tensor | None) -> HopperTile | None:
    """Return the tile with which the workgroup that has the most columns has the fewest.

    None if `kernel` has no such form, or has few tokens. A number of tokens that is not known counts as in
    `TileTable.matmul`, except a Bounded one, which is a number of rows and may be small.
    """
    if isinstance(tokens, (Bounded, Tensor)) or tokens is None:
        return None
    known = UNKNOWN_TOKENS if isinstance(tokens, str) else tokens
    tiles = [tile for tile in _tiles(kernel) if takes(kernel, tile)]
    if known < _LEAST_TOKENS or not tiles:
        return None

    def most_columns(tile: HopperTile) -> int:
        num_tiles = -(-known // ROWS) * (shape_of(kernel)[0] // tile.columns)
        return -(-num_tiles // PROGRAMS) * tile.columns

    return min(tiles, key=most_columns)  # of equal ones the widest


def _tiles(kernel: Kernel) -> tuple[HopperTile, ...]:
    """Return the tiles for the types of a matmul; none if it is another kernel, or has other types."""
    if kernel.function not in _FORMS:
        return ()
    reads = kernel.interface.reads
    return _TILES.get(reads["w"].dtype, ()) if reads["x"].dtype == reads["w"].dtype else ()


def with_tile(kernel: Kernel, tile: HopperTile) -> Kernel:
    """Return the form for Hopper of a matmul, with a certain tile."""
    sizes = {"ROWS": ROWS, "COLUMNS": tile.columns, "STAGES": tile.stages}
    return with_loads_by_tma(
        kernel, _FORMS[kernel.function], sizes, ROWS, tile.columns, tile.stages, _MAPS_BYTES
    )


def takes(kernel: Kernel, tile: HopperTile) -> bool:
    """Whether the form for Hopper computes all that `kernel` does, in whole tiles."""
    if not _tiles(kernel):
        return False
    out_features, in_features = shape_of(kernel)
    if out_features % tile.columns or in_features % _IN_MULTIPLE:
        return False
    return is_plain(kernel)
