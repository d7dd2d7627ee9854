"""Products of small tiles that divide K among the waves of a workgroup.

If a tile has few columns, the waves would otherwise all widen, or wait for, the same weights. The parts of K
are a product in three dimensions: each wave computes one matrix.
"""

import triton
import triton.language as tl


@triton.jit
def in_parts(tile, PARTS: tl.constexpr, PART_DEPTH: tl.constexpr):
    """Divide a tile [N, DEPTH] into parts of K, in turns of PART_DEPTH: [PARTS, N, DEPTH / PARTS]."""
    N: tl.constexpr = tile.shape[0]
    TURNS: tl.constexpr = tile.shape[1] // (PARTS * PART_DEPTH)
    turns = tl.reshape(tile, (N, TURNS, PARTS, PART_DEPTH))
    return tl.reshape(tl.permute(turns, (2, 0, 1, 3)), (PARTS, N, TURNS * PART_DEPTH))


@triton.jit
def parts_product(a, b, PARTS: tl.constexpr, PART_DEPTH: tl.constexpr, sums=None):
    """Return `sums` + the products of a [ROWS, DEPTH] and b [DEPTH, COLUMNS]: [PARTS, COLUMNS, ROWS] f32.

    b, the weights, comes first in the instructions: the first operand of these has 16 rows, the second 8.
    """
    rows = tl.permute(in_parts(a, PARTS, PART_DEPTH), (0, 2, 1))
    return tl.dot(in_parts(tl.trans(b), PARTS, PART_DEPTH), rows, sums, input_precision="ieee")


@triton.jit
def sum_of_parts(sums):
    """Add the parts of `sums` [PARTS, COLUMNS, ROWS]; return [ROWS, COLUMNS]."""
    return tl.trans(tl.sum(sums, axis=0))
