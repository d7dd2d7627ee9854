"""Reads the quantised blocks of a GGUF tensor into ours, which keeps every quant.

Types whose blocks have 32 weights keep their scales too. Those of K-quants are products, of an f16 for 256
weights and an integer for 32, which are rounded to f16. The layouts are those of llama.cpp's
`ggml/src/ggml-common.h` (block_q8_0, block_q4_K, ...): terms, then quants.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, ReaderTensor

from shortfin_apps.llm.builder.quantise import BLOCK, Bits, Blocks
from shortfin_apps.llm.builder.sources.base import Quantisation

_FLOATS = ("F64", "F32", "F16", "BF16")
_FEW_BITS = re.compile(r"(I?Q|TQ|MXFP|NVFP)[1-4](_.*)?")
_F16 = np.dtype("<f2")
_SUPER_BLOCK = 256  # weights that share a K-quant's f16
# What the quants of IQ4_NL and IQ4_XS stand for (`kvalues_iq4nl`).
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)

Bytes = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


def read_blocks(tensor: ReaderTensor) -> Blocks | None:
    """The blocks of a matrix of a type in `_READERS`; None for other types."""
    read = _READERS.get(tensor.tensor_type)
    return None if read is None else read(tensor, int(tensor.shape[0]))


def quantisation_of(tensors: Iterable[ReaderTensor]) -> Quantisation | None:
    """The quantisation of the type that most weights have; None where that is a float type."""
    weights: Counter[GGMLQuantizationType] = Counter()
    for tensor in tensors:
        weights[tensor.tensor_type] += int(tensor.n_elements)
    kind = max(weights, key=lambda each: weights[each], default=GGMLQuantizationType.F32)
    bits = bits_of(kind)
    if bits is None:
        return None
    return Quantisation(kind.name, "q4" if bits == 4 else "q8_0", kind in _READERS)


def bits_of(kind: GGMLQuantizationType) -> Bits | None:
    """The bits of our blocks that are nearest to those of a type; None for a float type."""
    if kind.name in _FLOATS:
        return None
    if kind in _EIGHT_BITS:
        return 8
    return 4 if _FEW_BITS.fullmatch(kind.name) else 8


def _q8_0(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, quants = _split(tensor, columns, 1)
    return Blocks(quants.view(np.int8).reshape(-1, columns), terms[..., 0], None)


def _q4_0(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, quants = _split(tensor, columns, 1)
    scales = terms[..., 0]
    return Blocks(_nibbles(quants).reshape(-1, columns), scales, scales * np.float16(-8))


def _q4_1(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, quants = _split(tensor, columns, 2)
    return Blocks(_nibbles(quants).reshape(-1, columns), terms[..., 0], terms[..., 1])


def _q5_0(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, data = _split(tensor, columns, 1)
    fifth = np.unpackbits(data[..., :4], axis=-1, bitorder="little")
    quants = (_nibbles(data[..., 4:]) | fifth << 4).astype(np.int8) - np.int8(16)
    return Blocks(quants.reshape(-1, columns), terms[..., 0], None)


def _iq4_nl(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, quants = _split(tensor, columns, 1)
    return Blocks(_IQ4_VALUES[_nibbles(quants)].reshape(-1, columns), terms[..., 0], None)


def _iq4_xs(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, data = _split(tensor, columns, 1, _SUPER_BLOCK)
    high = np.ascontiguousarray(data[..., :2]).view("<u2") >> 2 * np.arange(8, dtype=np.uint16) & 3
    low = np.stack([data[..., 2:6] & 15, data[..., 2:6] >> 4], axis=-1).reshape(*data.shape[:2], 8)
    scales = _products(terms[..., 0], (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32))
    quants = _IQ4_VALUES[_nibbles(data[..., 6:].reshape(*data.shape[:2], 8, 16))]
    return Blocks(quants.reshape(-1, columns), scales, None)


def _q4_k(tensor: ReaderTensor, columns: int) -> Blocks:
    terms, data = _split(tensor, columns, 2, _SUPER_BLOCK)
    # Six bits each: those of the first four blocks, then four bits of the others, whose rest is above them.
    scale, minimum, rest = np.split(data[..., :12], 3, axis=-1)
    scales = np.concatenate([scale & 63, rest & 15 | scale >> 2 & 48], axis=-1)
    minima = np.concatenate([minimum & 63, rest >> 4 | minimum >> 2 & 48], axis=-1)
    quants = data[..., 12:].reshape(*data.shape[:2], 4, BLOCK)
    return Blocks(
        np.stack([quants & 15, quants >> 4], axis=-2).reshape(-1, columns),
        _products(terms[..., 0], scales),
        -_products(terms[..., 1], minima),
    )


_READERS: dict[GGMLQuantizationType, Callable[[ReaderTensor, int], Blocks]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
}
# Of four bits, which stand for values of eight.
_EIGHT_BITS = (GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.IQ4_XS)


def _products(of_all: F16, of_blocks: npt.NDArray[np.int8] | Bytes) -> F16:
    """The terms of blocks, [rows, blocks], from those of super-blocks and of each of their blocks."""
    wide = of_all.astype(np.float32)[..., None] * of_blocks
    return wide.astype(np.float16).reshape(len(wide), -1)


def _split(tensor: ReaderTensor, columns: int, num_terms: int, block: int = BLOCK) -> tuple[F16, Bytes]:
    """Splits blocks into their f16 terms [rows, blocks, terms] and the bytes behind [rows, blocks, bytes]."""
    data = np.asarray(tensor.data, np.uint8)
    size = data.size // (int(tensor.n_elements) // block)
    blocks = np.ascontiguousarray(data).reshape(-1, columns // block, size)
    head = num_terms * _F16.itemsize
    terms = np.ascontiguousarray(blocks[..., :head]).view(_F16).astype(np.float16)
    return terms, np.ascontiguousarray(blocks[..., head:])


def _nibbles(quants: Bytes) -> Bytes:
    """Unpacks 4-bit values: byte j of a block has element j in its low and j + 16 in its high bits."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)
