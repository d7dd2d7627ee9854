"""Weights in quantised blocks of neighbours along K (see weights/layout.py), widened in registers.

A weight is quant * scale, or quant * scale + minimum, in f32. BLOCKS are the bits of a quant, 8 or 4, the
weights of a block, and those of a group or 0. `scales` and `minima` have a row for each of w: an f16 for each
block; or with groups, an f16 for each group and then an i8 for each block, of which the product is meant.
"""

import triton
import triton.language as tl


@triton.jit
def pairs_of(w, BLOCKS: tl.constexpr):
    """The address of w's pairs of neighbours along K: of one byte, or of two."""
    return w if BLOCKS[0] == 4 else w.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def load_terms(terms, row, first, IN: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Scales or minima of the tile of weights of DEPTH x `row` [COLUMNS] that begins at `first` along K.

    -> [DEPTH / a block's weights, COLUMNS], with zeros behind IN; None if `terms` is None.
    """
    if terms is None:
        return None
    else:
        SIZE: tl.constexpr = BLOCKS[1]
        block = first // SIZE + tl.arange(0, DEPTH // SIZE)
        inside = (block < IN // SIZE)[:, None]
        return _terms(terms, row[None, :].to(tl.int64), block[:, None], inside, IN, BLOCKS)


@triton.jit
def row_terms(terms, row, feature, inside, FEATURES: tl.constexpr, BLOCKS: tl.constexpr):
    """The scale or the minimum of each element `feature` of one row."""
    return _terms(terms, row, feature // BLOCKS[1], inside, FEATURES, BLOCKS)


@triton.jit
def _terms(terms, row, block, inside, IN: tl.constexpr, BLOCKS: tl.constexpr):
    """Those of blocks of rows: f16, or products in f32."""
    COUNT: tl.constexpr = IN // BLOCKS[1]
    if BLOCKS[2] == 0:
        return tl.load(terms + row * COUNT + block, mask=inside, other=0.0)
    else:
        GROUPS: tl.constexpr = IN // BLOCKS[2]
        of_row = terms + row * (2 * GROUPS + COUNT + COUNT % 2)
        shared = of_row.to(tl.pointer_type(tl.float16), bitcast=True) + block // (BLOCKS[2] // BLOCKS[1])
        own = tl.load(of_row + 2 * GROUPS + block, mask=inside, other=0)
        return tl.load(shared, mask=inside, other=0.0).to(tl.float32) * own.to(tl.float32)


@triton.jit
def dequantised(pairs, scale, minimum, BLOCKS: tl.constexpr):
    """[DEPTH / 2, COLUMNS] with the terms of its blocks -> [DEPTH, COLUMNS] f32, rounded once at most."""
    quants = _unpacked(pairs).to(tl.float32)
    blocks = tl.reshape(quants, (scale.shape[0], BLOCKS[1], scale.shape[1]))
    values = blocks * scale.to(tl.float32)[:, None, :]
    if minimum is not None:
        values += minimum.to(tl.float32)[:, None, :]
    return tl.reshape(values, quants.shape)


@triton.jit
def _unpacked(pairs):
    """[DEPTH / 2, COLUMNS] -> [DEPTH, COLUMNS] i8. The first of a pair is in its low bits.

    A join also keeps a tile from being widened by every wave that multiplies with it.
    """
    if pairs.dtype == tl.int16:
        both = tl.join(pairs.to(tl.int8), (pairs >> 8).to(tl.int8))
    else:
        both = tl.join(pairs & 15, (pairs >> 4) & 15)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (pairs.shape[0] * 2, pairs.shape[1]))
