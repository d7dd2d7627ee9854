"""Weights in quantised blocks of neighbours along K (see weights/layout.py), widened in registers.

A weight is quant * scale, or quant * scale + minimum, in f32. BLOCKS holds the bits of a quant (8 or 4), the
weights per block, the weights per group or 0, and whether 4 bits encode twice a float's value (E2M1 in
model/weight_blocks.py) instead of an integer. `scales` and `minima` have a row per row of w: an f16 for each
block; or, with groups, an f16 for each group followed by an i8 for each block, to be multiplied.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from shortfin_apps.llm.model import weight_blocks as block_types

PAIR = tl.constexpr(block_types.PAIR)
PTX_OFFSET, PTX_FLOAT_OFFSET = tl.constexpr(128.0), tl.constexpr(192.0)
FLOAT_UNIT = tl.constexpr(2.0**15)
# Unpacks four bytes: the low halves, then the high halves.
PTX = tl.constexpr("""{
    .reg .b32 low, high;
    and.b32 low, $8, 0x0F0F0F0F;
    shr.u32 high, $8, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43000000, 0x7044;
    prmt.b32 $1, low, 0x43000000, 0x7144;
    prmt.b32 $2, low, 0x43000000, 0x7244;
    prmt.b32 $3, low, 0x43000000, 0x7344;
    prmt.b32 $4, high, 0x43000000, 0x7044;
    prmt.b32 $5, high, 0x43000000, 0x7144;
    prmt.b32 $6, high, 0x43000000, 0x7244;
    prmt.b32 $7, high, 0x43000000, 0x7344;
}""")

# The same for floats, two bytes at a time. Byte tables hold 64 plus and 64 minus each magnitude; `signs`
# selects the latter for negative numbers. It has ones there: a selector's fourth bit replicates the sign bit.
PTX_FLOATS = tl.constexpr("""{
    .reg .b32 sizes, high, more, less, signs, first, second;
    and.b32 sizes, $8, 0x77777777;
    prmt.b32 more, 0x43424140, 0x4C484644, sizes;
    prmt.b32 less, 0x3D3E3F40, 0x34383A3C, sizes;
    prmt.b32 signs, 0x80808080, 0x80808080, $8;
    lop3.b32 first, more, less, signs, 0xD8;
    shr.u32 high, $8, 16;
    shr.u32 sizes, sizes, 16;
    prmt.b32 more, 0x43424140, 0x4C484644, sizes;
    prmt.b32 less, 0x3D3E3F40, 0x34383A3C, sizes;
    prmt.b32 signs, 0x80808080, 0x80808080, high;
    lop3.b32 second, more, less, signs, 0xD8;
    prmt.b32 $0, first, 0x43000000, 0x7044;
    prmt.b32 $1, first, 0x43000000, 0x7244;
    prmt.b32 $2, second, 0x43000000, 0x7044;
    prmt.b32 $3, second, 0x43000000, 0x7244;
    prmt.b32 $4, first, 0x43000000, 0x7144;
    prmt.b32 $5, first, 0x43000000, 0x7344;
    prmt.b32 $6, second, 0x43000000, 0x7144;
    prmt.b32 $7, second, 0x43000000, 0x7344;
}""")


@triton.jit
def widen(
    w, scales, minima, y,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Widen w, in BLOCKS, to y [OUT, IN]; a workgroup handles a tile of COLUMNS rows of w by DEPTH of K."""
    PACKED: tl.constexpr = 2 if BLOCKS[0] == 4 else 1
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * DEPTH
    exists = (row < OUT)[None, :]
    packed = first // PACKED + tl.arange(0, DEPTH // PACKED)
    at = tl.minimum(row, OUT - 1).to(tl.int64)
    tile = tl.load(
        w + at[None, :] * (IN // PACKED) + packed[:, None], mask=(packed < IN // PACKED)[:, None], other=0
    )
    scale = load_terms(scales, at, first, IN, DEPTH, BLOCKS)
    minimum = load_terms(minima, at, first, IN, DEPTH, BLOCKS)
    k = first + tl.arange(0, DEPTH)
    values = dequantised(tile, scale, minimum, BLOCKS).to(y.dtype.element_ty)
    tl.store(y + at[None, :] * IN + k[:, None], values, mask=exists & (k < IN)[:, None])


@triton.jit
def load_terms(terms, row, first, IN: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Load scales or minima of the weight tile DEPTH x `row` [COLUMNS] that starts at `first` along K.

    Returns [DEPTH / weights per block, COLUMNS] f32, with zeros past IN; None if `terms` is None.
    """
    if terms is None:
        return None
    else:
        SIZE: tl.constexpr = BLOCKS[1]
        COUNT: tl.constexpr = DEPTH // SIZE
        of_row = terms + row[None, :].to(tl.int64) * _row_size(IN, BLOCKS)
        block = (first // SIZE + tl.arange(0, COUNT))[:, None]
        if BLOCKS[2] == 0:
            return _values(of_row + block, block < IN // SIZE, IN % DEPTH == 0).to(tl.float32)
        else:
            GROUP: tl.constexpr = BLOCKS[2]
            own = of_row + 2 * (IN // GROUP) + block
            multiples = _values(own, block < IN // SIZE, IN % DEPTH == 0).to(tl.float32)
            # Each group of a tile is loaded once, if groups are aligned with tiles.
            IS_WITHIN: tl.constexpr = GROUP % DEPTH == 0 or GROUP == IN
            GROUPS: tl.constexpr = 1 if IS_WITHIN else DEPTH // GROUP if DEPTH % GROUP == 0 else COUNT
            group = (first // SIZE + tl.arange(0, GROUPS) * (COUNT // GROUPS)) // (GROUP // SIZE)
            shared = _group_values(of_row, group[:, None], (group < IN // GROUP)[:, None], IN % DEPTH == 0)
            blocks = tl.reshape(multiples, (GROUPS, COUNT // GROUPS, row.shape[0]))
            return tl.reshape(blocks * shared[:, None, :], multiples.shape)


@triton.jit
def row_terms(terms, row, feature, inside, FEATURES: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the scale or the minimum of each element `feature` of one row, in f32."""
    of_row = terms + row * _row_size(FEATURES, BLOCKS)
    block = feature // BLOCKS[1]
    if BLOCKS[2] == 0:
        return _values(of_row + block, inside, False).to(tl.float32)
    else:
        own = _values(of_row + 2 * (FEATURES // BLOCKS[2]) + block, inside, False)
        return _group_values(of_row, feature // BLOCKS[2], inside, False) * own.to(tl.float32)


@triton.jit
def _row_size(IN: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the elements of a row of terms: f16, or with groups bytes, padded to words."""
    COUNT: tl.constexpr = IN // BLOCKS[1]
    if BLOCKS[2] == 0:
        return COUNT
    else:
        return (2 * (IN // BLOCKS[2]) + COUNT + 3) // 4 * 4


@triton.jit
def _group_values(of_row, group, inside, ALL: tl.constexpr):
    """Load the f16 of groups as f32, two per word; Triton does not pipeline loads of less than a word."""
    words = of_row.to(tl.pointer_type(tl.int32), bitcast=True)
    halves = _values(words + group // 2, inside, ALL) >> (group % 2 * 16)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _values(at, inside, ALL: tl.constexpr):
    """Load the addresses that are `inside`, or with ALL every address; zeros elsewhere."""
    return tl.load(at) if ALL else tl.load(at, mask=inside, other=0)


@triton.jit
def dequantised(packed, scale, minimum, BLOCKS: tl.constexpr):
    """Widen a stored tile with the terms of its blocks to [DEPTH, COLUMNS] f32, rounded at most once.

    On NVIDIA GPUs, the sum of a minimum and OFFSET scales is rounded too, if they are far apart.
    """
    HAS_OFFSET: tl.constexpr = BLOCKS[0] == 4 and is_cuda()
    OFFSET: tl.constexpr = 0 if not HAS_OFFSET else PTX_FLOAT_OFFSET if BLOCKS[3] else PTX_OFFSET
    if BLOCKS[3] and not is_cuda():
        scale *= FLOAT_UNIT
    numbers = _unpacked(packed, BLOCKS[3]) if BLOCKS[0] == 4 else packed.to(tl.float32)
    blocks = tl.reshape(numbers, (scale.shape[0], BLOCKS[1], scale.shape[1]))
    wide = tl.broadcast_to(scale[:, None, :], blocks.shape)
    least = -OFFSET * scale if minimum is None else minimum - OFFSET * scale
    return tl.reshape(tl.fma(blocks, wide, tl.broadcast_to(least[:, None, :], blocks.shape)), numbers.shape)


@triton.jit
def _unpacked(packed, IS_E2M1: tl.constexpr):
    """Unpack [DEPTH / 2, COLUMNS] to [DEPTH, COLUMNS] f32; a byte has elements j and j + PAIR of 2 * PAIR.

    A lane of a matrix instruction then has both elements in its registers, and its bytes are contiguous.
    """
    COUNT: tl.constexpr = packed.shape[0] // PAIR
    COLUMNS: tl.constexpr = packed.shape[1]
    low, high = _float_halves(packed) if IS_E2M1 else _halves(packed)
    both = tl.reshape(tl.join(low, high), (COUNT, PAIR, COLUMNS, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * COUNT * PAIR, COLUMNS))


@triton.jit
def _float_halves(packed):
    """Return twice the floats in the low and the high 4 bits of bytes, in f32.

    On NVIDIA GPUs, they are larger by PTX_FLOAT_OFFSET; on others, in units of FLOAT_UNIT.
    """
    if is_cuda():
        return _by_ptx(packed, PTX_FLOATS)
    else:
        return _e2m1(packed.to(tl.int32)), _e2m1(packed.to(tl.int32) >> 4)


@triton.jit
def _e2m1(bits):
    """Return the floats in the low 4 bits, made from an f16's exponent and mantissa: 2**14 times smaller."""
    wide = (bits & 8) << 12 | (bits & 7) << 9
    return wide.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _halves(packed):
    """Return the low and the high 4 bits of bytes, in f32; on NVIDIA GPUs, larger by PTX_OFFSET.

    NVIDIA GPUs convert integers at a fraction of their speed. Instead, one instruction inserts the 4 bits
    into the mantissa of 128.0, where they count as an integer.
    """
    if is_cuda():
        return _by_ptx(packed, PTX)
    else:
        return (packed & 15).to(tl.float32), ((packed >> 4) & 15).to(tl.float32)


@triton.jit
def _by_ptx(packed, CODE: tl.constexpr):
    """Return the two f32 per byte that CODE makes of four bytes."""
    return tl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
    )
