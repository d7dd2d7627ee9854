"""The choice of the form for Hopper of a matmul of many tokens (kernels/triton/hopper_matmul.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.triton import hopper_matmul, linear, qkv
from shortfin_apps.llm.builder.lowering.triton.loads_by_tma import (
    PROGRAMS,
    num_tiles,
    shape_of,
    time_of,
    with_loads_by_tma,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import UNKNOWN_TOKENS

ROWS = 128  # of a tile: two groups of warps with 64 each, the rows of one matrix instruction
_LEAST_TOKENS = 129  # fewer are as fast in smaller tiles
_LEAST_IN = 2048  # SmolLM2-135M, with 576 and 1,536, is slower
_MAPS_BYTES = 256  # of a workgroup: the tensor maps of x and w
_DEPTHS = {"bf16": 64, "f8E4M3FN": 128}  # of K per buffer (DEPTH_BITS in hopper_product.py)
_HEADS = (64, 128)  # features of a head; others were not measured, or slower
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

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens, and rows of the weight."""
        return ROWS, self.columns


# The fastest on an H200 with the shapes of Llama 3.1 8B (bench/tune_matmul.py), widest first. In 8-bit
# floats, wider tiles lack registers for a second tile of sums.
_NARROW = (HopperTile(128, 6), HopperTile(64, 8))
_TILES = {"bf16": (HopperTile(256, 4), *_NARROW), "f8E4M3FN": _NARROW}


def hopper_form(kernel: Kernel, tokens: Dim | Tensor | None) -> Kernel:
    """Return the form for Hopper of a matmul of `tokens`; `kernel` itself if that may be faster.

    Both forms return equal bits (see hopper_product.py), so the choice changes no result. `kernel` must be
    without its absent operands.
    """
    tile = hopper_tile(kernel, tokens)
    return kernel if tile is None else with_tile(kernel, tile)


def hopper_tile(kernel: Kernel, tokens: Dim | Tensor | None) -> HopperTile | None:
    """Return the fastest tile.

    None if `kernel` has no such form, or has few tokens. A number of tokens that is not known counts as in
    `TileTable.matmul`, except a Bounded one, which is a number of rows and may be small.
    """
    if isinstance(tokens, (Bounded, Tensor)) or tokens is None:
        return None
    known = UNKNOWN_TOKENS if isinstance(tokens, str) else tokens
    tiles = [tile for tile in _tiles(kernel) if takes(kernel, tile) and _suits(kernel, known, tile)]
    if known < _LEAST_TOKENS or not tiles:
        return None
    return min(tiles, key=lambda tile: time_of(kernel, known, tile.sizes))  # the widest of equals


def _suits(kernel: Kernel, tokens: int, tile: HopperTile) -> bool:
    """Whether a tile may be the fastest: a narrow one only if all are computed at the same time."""
    is_at_once = num_tiles(kernel, tokens, tile.sizes) <= PROGRAMS
    return shape_of(kernel)[1] >= _LEAST_IN and (tile.columns > 64 or is_at_once)


def _tiles(kernel: Kernel) -> tuple[HopperTile, ...]:
    """Return the tiles for the types of a matmul; none if it is another kernel, or has other types."""
    if kernel.function not in _FORMS:
        return ()
    reads = kernel.interface.reads
    return _TILES.get(reads["w"].dtype, ()) if reads["x"].dtype == reads["w"].dtype else ()


def with_tile(kernel: Kernel, tile: HopperTile) -> Kernel:
    """Return the form for Hopper of a matmul, with a certain tile."""
    sizes = {"ROWS": ROWS, "COLUMNS": tile.columns, "STAGES": tile.stages}
    return with_loads_by_tma(kernel, _FORMS[kernel.function], sizes, tile.sizes, tile.stages, _MAPS_BYTES)


def takes(kernel: Kernel, tile: HopperTile) -> bool:
    """Whether the form for Hopper computes all that `kernel` does, in whole tiles."""
    if not _tiles(kernel):
        return False
    out_features, in_features = shape_of(kernel)
    depth = _DEPTHS[kernel.interface.reads["w"].dtype]
    if out_features % tile.columns or in_features % depth:
        return False
    head_dim = kernel.constexprs.get("HEAD_DIM")
    return head_dim is None or (head_dim in _HEADS and head_dim in (tile.columns, tile.columns // 2))
