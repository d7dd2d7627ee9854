"""Weights in quantised blocks of neighbours along K (see weights/layout.py), widened in registers.

A weight is quant * scale, or quant * scale + minimum, in f32. BLOCKS is a tuple: the bits of a quant (8 or
4); the weights per block; the weights per group, or 0 without groups; whether 4 bits encode a float (E2M1
in model/weight_blocks.py) instead of an integer, in which case the quant is twice the float's value; and
whether scales and minima are bf16. `scales` and `minima` have a row per row of w:

    without groups    an f16 for each block
    with groups       an f16 for each group, then an i8 for each block; a scale or minimum is their product
    in bf16           without groups, a bf16 for each block; of 4 bits, a minimum is the value of the quant
                      MIDDLE instead of 0
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from shortfin_apps.llm.model import weight_blocks as block_types

PAIR = tl.constexpr(block_types.PAIR)
FLOAT_UNIT = tl.constexpr(2.0**15)
MIDDLE = tl.constexpr(float(block_types.MIDDLE))


def _ptx(unpack: str, number: str, one: int, exponent: int, offset: int) -> tl.constexpr:
    """Return PTX that widens four bytes to eight 16-bit floats, as number * scale + addend.

    The first four are of the low 4 bits of the bytes, then come four of the high 4 bits. NVIDIA GPUs convert
    integers at a fraction of their speed, so `unpack` leaves quants in bytes, which become mantissas of
    floats that are larger by an offset. Subtracting it is exact: only the last operation, a fused
    multiply-add, rounds. `number`: the type, bf16 or f16; the others are the bits of 1, of the `exponent`
    (a byte) and of minus the offset (for integers also minus MIDDLE).
    """
    subtracted = "\n".join(f"    fma.rn.{number}x2 {each}, {each}, one, offset;" for each in "abcd")
    scaled = "\n".join(
        f"    fma.rn.{number}x2 ${n}, {each}, ${5 + n % 2}, ${7 + n % 2};" for n, each in enumerate("abcd")
    )
    return tl.constexpr(f"""{{
    .reg .b32 low, high, sizes, more, less, signs, first, second, exponent, a, b, c, d, one, offset;
    mov.b32 exponent, {exponent * 0x01010101:#x};
    mov.b32 one, {one * 0x00010001:#x};
    mov.b32 offset, {offset * 0x00010001:#x};
{unpack}
{subtracted}
{scaled}
}}""")


_INTEGERS = """
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 a, low, exponent, 0x4140;
    prmt.b32 b, low, exponent, 0x4342;
    prmt.b32 c, high, exponent, 0x4140;
    prmt.b32 d, high, exponent, 0x4342;
"""
# Twice the values of floats of 4 bits (E2M1), two bytes at a time. The byte tables hold 64 plus, and 64
# minus, twice each magnitude, so the offset is larger by 64. `signs` selects the second table for negative
# floats: their bytes of `signs` are all ones, as the fourth bit of a selector of prmt replicates the sign of
# the selected byte.
_FLOATS = """
    and.b32 sizes, $4, 0x77777777;
    prmt.b32 more, 0x43424140, 0x4C484644, sizes;
    prmt.b32 less, 0x3D3E3F40, 0x34383A3C, sizes;
    prmt.b32 signs, 0x80808080, 0x80808080, $4;
    lop3.b32 first, more, less, signs, 0xD8;
    shr.u32 high, $4, 16;
    shr.u32 sizes, sizes, 16;
    prmt.b32 more, 0x43424140, 0x4C484644, sizes;
    prmt.b32 less, 0x3D3E3F40, 0x34383A3C, sizes;
    prmt.b32 signs, 0x80808080, 0x80808080, high;
    lop3.b32 second, more, less, signs, 0xD8;
    prmt.b32 a, first, exponent, 0x4240;
    prmt.b32 b, second, exponent, 0x4240;
    prmt.b32 c, first, exponent, 0x4341;
    prmt.b32 d, second, exponent, 0x4341;
"""
PTX_BF16 = _ptx(_INTEGERS, "bf16", 0x3F80, 0x43, 0xC308)  # minus 128 + MIDDLE
PTX_F16 = _ptx(_INTEGERS, "f16", 0x3C00, 0x64, 0xE408)  # minus 1024 + MIDDLE
# Signed bytes to bf16, whose mantissa has 7 bits: the low 7 bits of a byte plus 128, minus 128 or, for a
# negative byte, 256. Then the product with the scale plus an addend is rounded.
PTX_BYTES = tl.constexpr("""{
    .reg .b32 low, sign, exponent, minus, a, b, c, d;
    mov.b32 exponent, 0x43434343;
    mov.b32 minus, 0xBF80BF80;
    and.b32 low, $2, 0x7F7F7F7F;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 a, low, exponent, 0x4140;
    prmt.b32 b, low, exponent, 0x4342;
    prmt.b32 c, sign, exponent, 0x4140;
    prmt.b32 d, sign, exponent, 0x4342;
    fma.rn.bf16x2 a, c, minus, a;
    fma.rn.bf16x2 b, d, minus, b;
    fma.rn.bf16x2 $0, a, $3, $5;
    fma.rn.bf16x2 $1, b, $4, $6;
}""")
PTX_FLOATS_BF16 = _ptx(_FLOATS, "bf16", 0x3F80, 0x43, 0xC340)
PTX_FLOATS_F16 = _ptx(_FLOATS, "f16", 0x3C00, 0x64, 0xE440)


@triton.jit
def widen(
    w, scales, minima, x, y,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Dequantise w, in BLOCKS, to y [OUT, IN]. Nothing is read from `x`.

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
    values = dequantised(tile, scale, minimum, y.dtype.element_ty, BLOCKS)
    tl.store(y + at[None, :] * IN + k[:, None], values, mask=exists & (k < IN)[:, None])


@triton.jit
def load_terms(terms, row, first, IN: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Load the scales or the minima `terms` of a tile of weights: DEPTH elements of K from `first` on.

    `row` [COLUMNS] are the tile's rows of w. Returns [DEPTH / weights per block, COLUMNS] f32, or bf16 if
    they are stored so, with zeros at and after IN; None if `terms` is None.
    """
    if terms is None:
        return None
    else:
        SIZE: tl.constexpr = BLOCKS[1]
        COUNT: tl.constexpr = DEPTH // SIZE
        of_row = terms + row[None, :].to(tl.int64) * _row_size(IN, BLOCKS)
        block = (first // SIZE + tl.arange(0, COUNT))[:, None]
        if BLOCKS[2] == 0:
            own = _values(of_row + block, block < IN // SIZE, IN % DEPTH == 0)
            return own if BLOCKS[4] else own.to(tl.float32)
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
def dequantised(packed, scale, minimum, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """Dequantise a stored tile to [DEPTH, COLUMNS] of `dtype`, with a fused multiply-add.

    It rounds once, to f32 and from there to `dtype`. For 4 bits on NVIDIA GPUs and a `dtype` of 16 bits, the
    scale and the value of the middle quant are rounded to `dtype` first, and so are scales in bf16.
    """
    if BLOCKS[0] == 4 and is_cuda() and dtype.primitive_bitwidth == 16:
        return _dequantised_by_ptx(packed, scale, minimum, dtype, BLOCKS)
    elif BLOCKS[4]:
        wide = _of_each(scale, BLOCKS[1])
        # -0.0 changes no product, not even one of 0.
        least = tl.full(wide.shape, -0.0, wide.dtype) if minimum is None else _of_each(minimum, BLOCKS[1])
        return tl.inline_asm_elementwise(
            PTX_BYTES, "=r,=r,r,r,r,r,r", [packed, wide, least], dtype=wide.dtype, is_pure=True, pack=4
        )
    else:
        if BLOCKS[3]:
            scale *= FLOAT_UNIT
        numbers = _unpacked(packed, BLOCKS[3]) if BLOCKS[0] == 4 else packed.to(tl.float32)
        wide = _of_each(scale, BLOCKS[1])
        least = 0.0 if minimum is None else _of_each(minimum, BLOCKS[1])
        return tl.fma(numbers, wide, least).to(dtype)


@triton.jit
def _dequantised_by_ptx(packed, scale, minimum, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """Dequantise 4 bits to a `dtype` of 16 bits (see _ptx)."""
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    INTEGERS: tl.constexpr = PTX_BF16 if IS_BF16 else PTX_F16
    FLOATS: tl.constexpr = PTX_FLOATS_BF16 if IS_BF16 else PTX_FLOATS_F16
    # Integers are counted from the middle. Their minimum is larger than most of the block's weights, and so
    # would be its rounding error.
    if BLOCKS[4] and minimum is not None:
        middle = minimum
    elif not BLOCKS[3]:
        middle = MIDDLE * scale if minimum is None else tl.fma(scale, MIDDLE, minimum)
    else:
        middle = tl.zeros_like(scale)
    wide = _of_each(scale.to(dtype), BLOCKS[1] // 2)
    least = _of_each(middle.to(dtype), BLOCKS[1] // 2)
    low, high = tl.inline_asm_elementwise(
        FLOATS if BLOCKS[3] else INTEGERS,
        "=r,=r,=r,=r,r,r,r,r,r",
        [packed, wide, least],
        dtype=(wide.dtype, wide.dtype),
        is_pure=True,
        pack=4,
    )
    return _in_order(low, high)


@triton.jit
def _of_each(terms, COUNT: tl.constexpr):
    """Repeat the term of each block COUNT times along K."""
    BLOCKS: tl.constexpr = terms.shape[0]
    COLUMNS: tl.constexpr = terms.shape[1]
    repeated = tl.broadcast_to(terms[:, None, :], (BLOCKS, COUNT, COLUMNS))
    return tl.reshape(repeated, (BLOCKS * COUNT, COLUMNS))


@triton.jit
def _unpacked(packed, IS_E2M1: tl.constexpr):
    """Unpack 4 bits: [DEPTH / 2, COLUMNS] -> [DEPTH, COLUMNS] f32; floats (E2M1) as _e2m1 does."""
    if IS_E2M1:
        return _in_order(_e2m1(packed.to(tl.int32)), _e2m1(packed.to(tl.int32) >> 4))
    else:
        return _in_order((packed & 15).to(tl.float32), ((packed >> 4) & 15).to(tl.float32))


@triton.jit
def _in_order(low, high):
    """Order what was unpacked from the low and from the high 4 bits, both [DEPTH / 2, COLUMNS].

    Returns [DEPTH, COLUMNS]. Of 2 * PAIR neighbours, byte j has elements j and j + PAIR. A lane of a matrix
    instruction then has both elements in its registers, and the lane's bytes are contiguous.
    """
    COUNT: tl.constexpr = low.shape[0] // PAIR
    COLUMNS: tl.constexpr = low.shape[1]
    both = tl.reshape(tl.join(low, high), (COUNT, PAIR, COLUMNS, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * COUNT * PAIR, COLUMNS))


@triton.jit
def _e2m1(bits):
    """Return the floats (E2M1) in the low 4 bits, times 2**-14.

    The 4 bits become the sign, exponent and mantissa of an f16.
    """
    wide = (bits & 8) << 12 | (bits & 7) << 9
    return wide.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
