"""Weights in quantised blocks of neighbours along K (see weights/layout.py), widened in registers.

A weight is quant * scale, or quant * scale + minimum, in f32. BLOCKS is a tuple: the bits of a quant (8 or
4); the weights per block; the weights per group, or 0 without groups; and whether 4 bits encode a float
(E2M1 in model/weight_blocks.py) instead of an integer, in which case the quant is twice the float's value.
`scales` and `minima` have a row per row of w. Without groups, a row has an f16 for each block. With groups,
it has an f16 for each group, then an i8 for each block; the scale or minimum of a block is the product of
the two.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from shortfin_apps.llm.model import weight_blocks as block_types

PAIR = tl.constexpr(block_types.PAIR)
PTX_OFFSET, PTX_FLOAT_OFFSET = tl.constexpr(128.0), tl.constexpr(192.0)
FLOAT_UNIT = tl.constexpr(2.0**15)
# Unpacks four bytes to eight f32: four of low 4 bits, then four of high 4 bits. Each is larger by PTX_OFFSET.
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

# Unpacks floats of 4 bits (E2M1) in this order, two bytes at a time, to twice their values plus
# PTX_FLOAT_OFFSET. The byte tables hold 64 plus, and 64 minus, twice each magnitude. `signs` selects the
# second table for negative floats: their bytes of `signs` are all ones, as the fourth bit of a selector of
# prmt replicates the sign of the selected byte.
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
    """Dequantise w, in BLOCKS, to y [OUT, IN].

    A workgroup handles a tile of COLUMNS rows of w by DEPTH elements of K.
    """
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
    """Load the scales or the minima `terms` of a tile of weights: DEPTH elements of K from `first` on.

    `row` [COLUMNS] are the tile's rows of w. Returns [DEPTH / weights per block, COLUMNS] f32, with zeros at
    and after IN; None if `terms` is None.
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
    """Return the scale, or the minimum, of each element `feature` of row `row` of w, in f32."""
    of_row = terms + row * _row_size(FEATURES, BLOCKS)
    block = feature // BLOCKS[1]
    if BLOCKS[2] == 0:
        return _values(of_row + block, inside, False).to(tl.float32)
    else:
        own = _values(of_row + 2 * (FEATURES // BLOCKS[2]) + block, inside, False)
        return _group_values(of_row, feature // BLOCKS[2], inside, False) * own.to(tl.float32)


@triton.jit
def _row_size(IN: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the number of elements of a row of scales or minima.

    The elements are f16; with groups, bytes padded to a multiple of 4.
    """
    COUNT: tl.constexpr = IN // BLOCKS[1]
    if BLOCKS[2] == 0:
        return COUNT
    else:
        return (2 * (IN // BLOCKS[2]) + COUNT + 3) // 4 * 4


@triton.jit
def _group_values(of_row, group, inside, ALL: tl.constexpr):
    """Load the f16 of the groups `group`, as f32.

    Loads the 32-bit word that contains the f16: Triton does not pipeline loads of less than a word.
    """
    words = of_row.to(tl.pointer_type(tl.int32), bitcast=True)
    halves = _values(words + group // 2, inside, ALL) >> (group % 2 * 16)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _values(at, inside, ALL: tl.constexpr):
    """Load the addresses that are `inside`, with zeros elsewhere; with ALL, load every address."""
    return tl.load(at) if ALL else tl.load(at, mask=inside, other=0)


@triton.jit
def dequantised(packed, scale, minimum, BLOCKS: tl.constexpr):
    """Dequantise a stored tile to [DEPTH, COLUMNS] f32, with a fused multiply-add (one rounding).

    On NVIDIA GPUs, quants of 4 bits are larger by OFFSET, so the minimum is reduced by OFFSET * scale. The
    difference is rounded too if minimum and OFFSET * scale are far apart.
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
    """Unpack 4 bits: [DEPTH / 2, COLUMNS] -> [DEPTH, COLUMNS] f32.

    Of 2 * PAIR neighbours, byte j has elements j and j + PAIR. A lane of a matrix instruction then has both
    elements in its registers, and the lane's bytes are contiguous.
    """
    COUNT: tl.constexpr = packed.shape[0] // PAIR
    COLUMNS: tl.constexpr = packed.shape[1]
    low, high = _float_halves(packed) if IS_E2M1 else _halves(packed)
    both = tl.reshape(tl.join(low, high), (COUNT, PAIR, COLUMNS, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * COUNT * PAIR, COLUMNS))


@triton.jit
def _float_halves(packed):
    """Return twice the floats (E2M1) in the low and in the high 4 bits of bytes, as f32.

    On NVIDIA GPUs, the results are larger by PTX_FLOAT_OFFSET; on other GPUs, they are divided by
    FLOAT_UNIT.
    """
    if is_cuda():
        return _by_ptx(packed, PTX_FLOATS)
    else:
        return _e2m1(packed.to(tl.int32)), _e2m1(packed.to(tl.int32) >> 4)


@triton.jit
def _e2m1(bits):
    """Return the floats (E2M1) in the low 4 bits, times 2**-14.

    The 4 bits become the sign, exponent and mantissa of an f16.
    """
    wide = (bits & 8) << 12 | (bits & 7) << 9
    return wide.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _halves(packed):
    """Return the low and the high 4 bits of bytes, as f32; on NVIDIA GPUs, larger by PTX_OFFSET.

    NVIDIA GPUs convert integers at a fraction of their speed. Instead, one instruction inserts the 4 bits
    into the mantissa of 128.0, so that the float is 128 plus the integer.
    """
    if is_cuda():
        return _by_ptx(packed, PTX)
    else:
        return (packed & 15).to(tl.float32), ((packed >> 4) & 15).to(tl.float32)


@triton.jit
def _by_ptx(packed, CODE: tl.constexpr):
    """Apply the PTX `CODE`, which unpacks four bytes to eight f32; return two f32 tensors like `packed`."""
    return tl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
    )
