"""The choice of the form for Hopper of a matmul with weights in blocks.

The form is in kernels/triton/hopper_block_matmul.py. It returns the bits of the Triton kernel with PARTS = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.triton import hopper_block_matmul, hopper_blocks, linear, qkv
from shortfin_apps.llm.builder.lowering.triton.loads_by_tma import (
    num_tiles,
    shape_of,
    time_of,
    with_loads_by_tma,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import UNKNOWN_TOKENS

_LEAST_TOKENS = 33  # fewer are added in parts of K (`bf16_blocks` in tiles.py)
_MOST_TOKENS = 2047  # from 2048 on, widening a weight once is as fast
_LEAST_TILES = 48  # fewer leave most multiprocessors without one
_IN_MULTIPLE = 2 * hopper_blocks.DEPTH.value
_MAPS_BYTES = 512  # of a workgroup: the tensor maps of x, w, scales and minima
_FORMS = {
    linear.linear: hopper_block_matmul.linear,
    linear.gated_linear: hopper_block_matmul.gated_linear,
    qkv.project_qkv: hopper_block_matmul.project_qkv,
}


@dataclass(frozen=True, slots=True)
class HopperBlockTile:
    """A tile of `tokens` by hopper_blocks.TILE rows of the weight; `stages`: loads of K in flight."""

    tokens: int
    stages: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens, and rows of the weight."""
        return self.tokens, hopper_blocks.TILE.value


# By bits of a weight, largest first, with as many stages as fit into shared memory.
_TILES: dict[int, tuple[HopperBlockTile, ...]] = {
    4: (HopperBlockTile(128, 4), HopperBlockTile(64, 6)),
    8: (HopperBlockTile(128, 4), HopperBlockTile(64, 5)),
}


def block_form(kernel: Kernel, tokens: Dim | Tensor | None) -> Kernel:
    """Return the form for Hopper of a matmul of `tokens`; `kernel` itself if that may be faster."""
    tile = block_tile(kernel, tokens)
    return kernel if tile is None else with_block_tile(kernel, tile)


def block_tile(kernel: Kernel, tokens: Dim | Tensor | None) -> HopperBlockTile | None:
    """Return the fastest tile of the form for Hopper; None if `kernel` has no such form, or may be faster.

    `tokens` counts as in `hopper_tile`; `kernel` must be without its absent operands.
    """
    if isinstance(tokens, (Bounded, Tensor)) or tokens is None or not takes_blocks(kernel):
        return None
    tiles = _TILES[_blocks(kernel)[0]]
    if isinstance(tokens, str):
        known, tiles = UNKNOWN_TOKENS, tiles[:1]  # 64 tokens: 1 % faster for 512, but 3 % slower for 2,048
    else:
        known = tokens
    fastest = min(tiles, key=lambda tile: time_of(kernel, known, tile.sizes))
    has_tiles = num_tiles(kernel, known, fastest.sizes) >= _LEAST_TILES
    return fastest if _LEAST_TOKENS <= known <= _MOST_TOKENS and has_tiles else None


def with_block_tile(kernel: Kernel, tile: HopperBlockTile) -> Kernel:
    """Return the form for Hopper of a matmul, with a certain tile."""
    function, sizes = _FORMS[kernel.function], {"TOKENS": tile.tokens, "STAGES": tile.stages}
    return with_loads_by_tma(kernel, function, sizes, tile.sizes, tile.stages, _MAPS_BYTES)


def takes_blocks(kernel: Kernel) -> bool:
    """Whether the form for Hopper computes all that `kernel` does, in whole tiles.

    Terms must be in bf16, and blocks of 4 bits have minima: of the types that have such terms, all do.
    """
    if kernel.function not in _FORMS or "scales" not in kernel.interface.reads:
        return False
    blocks, (out_features, in_features) = _blocks(kernel), shape_of(kernel)
    is_whole = out_features % hopper_blocks.TILE.value == in_features % _IN_MULTIPLE == 0
    has_heads = kernel.constexprs.get("HEAD_DIM", hopper_blocks.TILE.value) == hopper_blocks.TILE.value
    return bool(blocks and blocks[4]) and is_whole and has_heads


def _blocks(kernel: Kernel) -> tuple[int, ...]:
    """Return the constant BLOCKS of kernels/triton/blocks.py; empty for other weights."""
    blocks = kernel.constexprs["BLOCKS"]
    return blocks if isinstance(blocks, tuple) else ()
