"""Weights in quantised blocks of BLOCK neighbours along K (see weights/layout.py), widened in registers.

A weight is quant * scale, or quant * scale + minimum, in f32; `scales` and `minima` are those of all blocks,
[.., K / BLOCK] f16. Where there are minima a quant has 4 bits, else 8.
"""

import triton
import triton.language as tl

from shortfin_apps.llm.builder import quantise

BLOCK = tl.constexpr(quantise.BLOCK)


@triton.jit
def pairs_of(w, minima):
    """The address of w's pairs of neighbours along K: of one byte if there are minima, of two otherwise."""
    return w.to(tl.pointer_type(tl.int16), bitcast=True) if minima is None else w


@triton.jit
def load_terms(terms, row, first, IN: tl.constexpr, DEPTH: tl.constexpr):
    """Scales or minima of the tile of weights of DEPTH x `row` [COLUMNS] that begins at `first` along K.

    -> [DEPTH / BLOCK, COLUMNS] f16, with zeros behind IN; None if `terms` is None.
    """
    if terms is None:
        return None
    else:
        block = first // BLOCK + tl.arange(0, DEPTH // BLOCK)
        at = terms + row[None, :].to(tl.int64) * (IN // BLOCK) + block[:, None]
        return tl.load(at, mask=(block < IN // BLOCK)[:, None], other=0.0)


@triton.jit
def dequantised(pairs, scale, minimum):
    """[DEPTH / 2, COLUMNS] with the terms of its blocks -> [DEPTH, COLUMNS] f32, rounded once at most."""
    quants = _unpacked(pairs).to(tl.float32)
    blocks = tl.reshape(quants, (scale.shape[0], BLOCK, scale.shape[1]))
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


@triton.jit
def row_scales(scales, row, feature, inside, FEATURES: tl.constexpr):
    """The scale of each element `feature` of one row, in f32."""
    at = scales + row * (FEATURES // BLOCK) + feature // BLOCK
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)
