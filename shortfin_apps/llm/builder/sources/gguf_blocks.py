"""Matrices in a GGUF file: split stacked experts into matrices, and convert quantised tensors to Blocks.

In a file, one tensor has the matrices of all experts of a layer, [experts, out, in], or all biases.

In K-quants, a scale or a minimum is an f16 per 256 weights times an integer per 16 or 32 weights; Blocks
store both factors. IQ1, IQ2 and IQ3 have such scales too, and integers from a codebook, which is that of the
`gguf` package. llama.cpp's `ggml/src/ggml-common.h` defines the layouts (block_q8_0, block_q4_K, ...).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor, dequantize
from gguf import quants as library

from shortfin_apps.llm.builder.sources.base import FLOAT_TYPES, Quantisation, mxfp4_blocks
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_EXPERTS, check_at_most
from shortfin_apps.llm.model.weight_blocks import BLOCK, MXFP4, Q4_1, Q8_0, Blocks, BlockType, Terms

_STACKED = re.compile(r"(blk\.\d+\.ffn)_(gate|up|down|gate_up)_exps\.(weight|bias)")
_RANKS = {"weight": 3, "bias": 2}
_F16 = np.dtype("<f2")
_IQ4_VALUES = np.array(library.IQ4_NL.kvalues, np.int8)  # 4-bit index -> value, in IQ4_NL and IQ4_XS

Bytes = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
Quants = npt.NDArray[np.int8] | npt.NDArray[np.uint8]
# Quants (whose axes after the rows are flattened later), scales and, for some types, minima.
Read = tuple[Quants, Terms] | tuple[Quants, Terms, Terms]


def each_matrix(where: str, tensors: Iterable[ReaderTensor]) -> Iterator[ReaderTensor]:
    """Yield the tensors, but split a tensor of stacked experts into one tensor per expert, without copying.

    The new tensors are named as in older GGUF files, `blk.LAYER.ffn_gate.EXPERT.weight`. Raises BuildError
    for more than MAX_EXPERTS experts; `where` names the file.
    """
    num_experts = 0
    for tensor in tensors:
        stacked = _STACKED.fullmatch(tensor.name)
        if stacked is None or len(tensor.shape) != _RANKS[stacked[3]] or _is_odd(stacked[2], tensor):
            yield tensor
            continue
        kinds = stacked[2].split("_")  # gate and up may be halves of one matrix
        count = len(kinds) * len(tensor.data)
        num_experts += count  # checked, as a small file can claim many experts of size 0
        check_at_most(where, "its tensors hold {} experts", num_experts, MAX_EXPERTS)
        for number, data in enumerate(part for each in tensor.data for part in np.split(each, len(kinds))):
            expert, kind = divmod(number, len(kinds))
            yield tensor._replace(
                name=f"{stacked[1]}_{kinds[kind]}.{expert}.{stacked[3]}",
                shape=np.array([*tensor.shape[:-2], tensor.shape[-2] // len(kinds)]),
                n_elements=tensor.n_elements // count,
                n_bytes=data.nbytes,
                data_offset=tensor.data_offset + number * data.nbytes,
                data=data,
            )


def _is_odd(kind: str, tensor: ReaderTensor) -> bool:
    return kind == "gate_up" and tensor.shape[-2] % 2 == 1


def read_blocks(tensor: ReaderTensor) -> Blocks | None:
    """Return a matrix as Blocks; None if its type is not in `_READERS`."""
    if tensor.tensor_type not in _READERS:
        return None
    kind, read = _READERS[tensor.tensor_type]
    quants, *terms = read(_Data(tensor))
    return Blocks(kind, quants.reshape(-1, int(tensor.shape[0])), *terms)


def quantisation_of(tensors: Iterable[ReaderTensor]) -> Quantisation | None:
    """Return the quantisation of the type with the most weights; None if this is a float type."""
    weights: Counter[GGMLQuantizationType] = Counter()
    for tensor in tensors:
        weights[tensor.tensor_type] += int(tensor.n_elements)
    kind = max(weights, key=lambda each: weights[each], default=GGMLQuantizationType.F32)
    blocks = block_type_of(kind)
    if blocks is None:
        return None
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    bits = 8 * num_bytes / num_weights
    return Quantisation(
        kind.name,
        "q4" if blocks.bits == 4 else "q8_0",
        kept=kind in _READERS,
        bits=bits if bits < blocks.bits else None,
    )


def block_type_of(kind: GGMLQuantizationType) -> BlockType | None:
    """Return the block type for a GGUF type; None for float types.

    For quantised types that `read_blocks` does not support (TQ1_0, TQ2_0 and NVFP4), this is the nearest one.
    """
    if kind.name in FLOAT_TYPES:
        return None
    return _READERS[kind][0] if kind in _READERS else Q4_1


def is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this type can be read, as floats at least."""
    return kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) or hasattr(library, kind.name)


class _Data:
    """The bytes of a tensor, [rows, blocks, bytes per block]."""

    def __init__(self, tensor: ReaderTensor) -> None:
        self._type = tensor.tensor_type
        weights, size = GGML_QUANT_SIZES[self._type]
        data = np.ascontiguousarray(np.asarray(tensor.data, np.uint8))
        self._blocks = data.reshape(-1, int(tensor.shape[0]) // weights, size)

    def part(self, start: int, end: int | None = None) -> Bytes:
        """Return bytes `start` to `end` of each block, [rows, blocks, end - start]."""
        return np.ascontiguousarray(self._blocks[..., start:end])

    def f16(self, start: int) -> F16:
        """Return the f16 at byte `start` of each block, [rows, blocks]."""
        return self.part(start, start + _F16.itemsize).view(_F16)[..., 0].astype(np.float16)

    def divided(self, scales: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
        """Return the weights divided by their `scales` [rows, blocks, scales of a block], and rounded."""
        quants = np.empty((*scales.shape, GGML_QUANT_SIZES[self._type][0] // scales.shape[-1]), np.int8)
        for start in range(0, len(quants), _ROWS):
            rows = slice(start, start + _ROWS)
            scale = scales[rows, ..., None]
            with np.errstate(invalid="ignore"):  # of infinite scales, which callers reject
                values = dequantize(self._blocks[rows].reshape(len(scale), -1), self._type)
                inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
                quants[rows] = np.rint(values.reshape(quants[rows].shape) * inverse)
        return quants


def _q8_0(data: _Data) -> Read:
    return data.part(2).view(np.int8), Terms(data.f16(0))


def _q4_0(data: _Data) -> Read:
    scales = data.f16(0)
    return _nibbles(data.part(2)), Terms(scales), Terms(scales * np.float16(-8))


def _q4_1(data: _Data) -> Read:
    return _nibbles(data.part(4)), Terms(data.f16(0)), Terms(data.f16(2))


def _q5_0(data: _Data) -> Read:
    return _five_bits(data.part(2, 6), data.part(6)) - np.int8(16), Terms(data.f16(0))


def _q5_1(data: _Data) -> Read:
    return _five_bits(data.part(4, 8), data.part(8)), Terms(data.f16(0)), Terms(data.f16(2))


def _iq4_nl(data: _Data) -> Read:
    return _IQ4_VALUES[_nibbles(data.part(2))], Terms(data.f16(0))


def _iq4_xs(data: _Data) -> Read:
    high = data.part(2, 4).view("<u2") >> 2 * np.arange(8, dtype=np.uint16) & 3
    low = np.stack([data.part(4, 8) & 15, data.part(4, 8) >> 4], axis=-1).reshape(high.shape)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    packed = data.part(8)
    quants = _IQ4_VALUES[_nibbles(packed.reshape(*packed.shape[:2], 8, 16))]
    return quants, _terms(data.f16(0), scales)


def _q2_k(data: _Data) -> Read:
    terms = data.part(0, 16)
    scales, minima = _terms(data.f16(80), terms & 15), _terms(data.f16(82), -(terms >> 4).view(np.int8))
    return _bit_pairs(data.part(16, 80)), scales, minima


def _q3_k(data: _Data) -> Read:
    """Read Q3_K, `w = scale * (q - 4)`: the minimum is -4 * scale, stored as (2 * f16) * (-2 * integer)."""
    third = np.unpackbits(data.part(0, 32)[..., None, :], axis=-2, bitorder="little")
    quants = _bit_pairs(data.part(32, 96)) | third.reshape(*third.shape[:2], -1) << 2
    first, second, high = (data.part(start, start + 4) for start in (96, 100, 104))
    low = np.concatenate([first & 15, second & 15, first >> 4, second >> 4], axis=-1)
    top = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales, unit = (low | top << 4).view(np.int8) - np.int8(32), data.f16(108)
    minima = _terms(unit * np.float16(2), scales * np.int8(-2))
    return quants, _terms(unit, scales), minima


def _q4_k(data: _Data) -> Read:
    return _nibbles_of_two(data.part(16)), *_k_terms(data)


def _q5_k(data: _Data) -> Read:
    fifth = np.unpackbits(data.part(16, 48)[..., None, :], axis=-2, bitorder="little")
    low = _nibbles_of_two(data.part(48))
    quants = low | fifth.reshape(low.shape) << 4
    return quants.view(np.int8), *_k_terms(data)


def _q6_k(data: _Data) -> Read:
    low, high = data.part(0, 128), data.part(128, 192)
    low = low.reshape(*low.shape[:2], 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-1)
    quants = low | _bit_pairs(high).reshape(low.shape) << 4
    scales = _terms(data.f16(208), data.part(192, 208).view(np.int8))
    return quants.view(np.int8) - np.int8(32), scales


def _iq2_xxs(data: _Data) -> Read:
    return _coded(data, data.f16(0), 8, data.part(2).view("<u4")[..., 1::2] >> 28)


def _iq2_xs(data: _Data) -> Read:
    return _coded(data, data.f16(0), 8, _halves_of_bytes(data.part(66)))


def _iq2_s(data: _Data) -> Read:
    return _coded(data, data.f16(0), 8, _halves_of_bytes(data.part(74)))


def _iq3_xxs(data: _Data) -> Read:
    return _coded(data, data.f16(0), 4, data.part(66).view("<u4") >> 28)


def _iq3_s(data: _Data) -> Read:
    return _coded(data, data.f16(0), 1, _halves_of_bytes(data.part(106)))


def _iq1_s(data: _Data) -> Read:
    """Read IQ1_S, `w = f16 * integer * (q + shift)`: q is -1, 0 or 1, the shift of a block 1/8 or -1/8.

    A block with a negative shift gets a negative scale, so that its minimum is -7/8 of the scale like that of
    the others: -9/8 would take integers beyond -128.
    """
    units, high = data.f16(0), data.part(34).view("<u2")
    scales = (2 * (high >> 12 & 7) + 1).astype(np.int8)
    signs = np.where(high & 0x8000, np.int8(-1), np.int8(1))
    scales *= signs
    quants = data.divided(units.astype(np.float32)[..., None] * scales.astype(np.float32)) + np.int8(1)
    return quants.view(np.uint8), _terms(units, scales), _terms(units / np.float16(8), scales * np.int8(-7))


def _iq1_m(data: _Data) -> Read:
    """Read IQ1_M, like IQ1_S with a shift for 8 weights; its f16 is in the high bits of four integers."""
    packed = data.part(48).view("<u2")
    units = np.bitwise_or.reduce(packed >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
    steps = packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return _coded(data, units.view(np.float16), 8, steps.reshape(*packed.shape[:2], 16))


def _coded(data: _Data, units: F16, divisor: int, steps: npt.NDArray[np.integer]) -> Read:
    """Read `w = f16 / divisor * (2 * step + 1) * q`, where q is an integer of a codebook.

    `units`: the f16 [rows, groups]; `steps` [rows, groups, blocks of a group]. The scale f16 / divisor is
    rounded if it is below 2^-14.
    """
    multiples = (2 * steps + 1).astype(np.int8)
    exact = units.astype(np.float32) / np.float32(divisor)
    return data.divided(exact[..., None] * multiples.astype(np.float32)), _terms(
        exact.astype(np.float16), multiples
    )


def _mxfp4(data: _Data) -> Read:
    blocks = mxfp4_blocks(_nibbles(data.part(1)), data.part(0, 1)[..., 0])
    return blocks.quants, blocks.scales


_K_QUANT = 256  # weights per super-block, which share an f16
_ROWS = 1024  # which are dequantised at once
_Q5_1 = BlockType(8, has_minima=True)
_Q4_K, _Q6_K = BlockType(4, has_minima=True, group=_K_QUANT), BlockType(8, 16, group=_K_QUANT)
_CODES = BlockType(8, group=_K_QUANT)
_READERS: dict[GGMLQuantizationType, tuple[BlockType, Callable[[_Data], Read]]] = {
    GGMLQuantizationType.Q8_0: (Q8_0, _q8_0),
    GGMLQuantizationType.Q4_0: (Q4_1, _q4_0),
    GGMLQuantizationType.Q4_1: (Q4_1, _q4_1),
    GGMLQuantizationType.Q5_0: (Q8_0, _q5_0),
    GGMLQuantizationType.Q5_1: (_Q5_1, _q5_1),
    GGMLQuantizationType.Q2_K: (BlockType(4, 16, has_minima=True, group=_K_QUANT), _q2_k),
    GGMLQuantizationType.Q3_K: (BlockType(4, 16, has_minima=True, group=_K_QUANT), _q3_k),
    GGMLQuantizationType.Q4_K: (_Q4_K, _q4_k),
    GGMLQuantizationType.Q5_K: (BlockType(8, has_minima=True, group=_K_QUANT), _q5_k),
    GGMLQuantizationType.Q6_K: (_Q6_K, _q6_k),
    GGMLQuantizationType.IQ4_NL: (Q8_0, _iq4_nl),
    GGMLQuantizationType.MXFP4: (MXFP4, _mxfp4),
    GGMLQuantizationType.IQ4_XS: (_CODES, _iq4_xs),
    GGMLQuantizationType.IQ3_S: (_CODES, _iq3_s),
    GGMLQuantizationType.IQ3_XXS: (_CODES, _iq3_xxs),
    GGMLQuantizationType.IQ2_S: (_Q6_K, _iq2_s),
    GGMLQuantizationType.IQ2_XS: (_Q6_K, _iq2_xs),
    GGMLQuantizationType.IQ2_XXS: (_CODES, _iq2_xxs),
    GGMLQuantizationType.IQ1_M: (_Q6_K, _iq1_m),
    GGMLQuantizationType.IQ1_S: (_Q4_K, _iq1_s),
}


def _terms(units: F16, multiples: Bytes | npt.NDArray[np.int8]) -> Terms:
    """Return Terms of `units` [rows, groups] f16 and integer `multiples` [rows, groups, blocks per group]."""
    return Terms(units, multiples.view(np.int8).reshape(len(units), -1))


def _k_terms(data: _Data) -> tuple[Terms, Terms]:
    """Return the scales and minima of Q4_K and Q5_K.

    A super-block of 8 blocks starts with two f16, then 12 bytes with 6-bit integers. Bytes 0 to 3 have the
    scales of blocks 0 to 3 in their low 6 bits, bytes 4 to 7 the minima of these blocks. Bytes 8 to 11 have
    the low 4 bits of the scales (low half) and minima (high half) of blocks 4 to 7. Their high 2 bits are the
    high bits of bytes 0 to 3 (scales) and 4 to 7 (minima).
    """
    scale, minimum, rest = np.split(data.part(4, 16), 3, axis=-1)
    scales = np.concatenate([scale & 63, rest & 15 | scale >> 2 & 48], axis=-1)
    minima = np.concatenate([minimum & 63, rest >> 4 | minimum >> 2 & 48], axis=-1)
    return _terms(data.f16(0), scales), _terms(data.f16(2), -minima.view(np.int8))


def _nibbles(quants: Bytes) -> Bytes:
    """Unpack 4-bit values: the low halves of all bytes along the last axis, then the high halves."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)


def _nibbles_of_two(quants: Bytes) -> Bytes:
    """Unpack 4-bit values of K-quants: 32 bytes have one block in their low halves, the next in the high."""
    return _nibbles(quants.reshape(*quants.shape[:2], 4, BLOCK)).reshape(*quants.shape[:2], -1)


def _bit_pairs(quants: Bytes) -> Bytes:
    """Unpack 2-bit values: each 32 bytes have values 0-31 in bits 0-1, values 32-63 in bits 2-3, etc."""
    halves = quants.reshape(*quants.shape[:2], 2, 32)
    fours = np.concatenate([halves >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return fours.reshape(*quants.shape[:2], -1)


def _halves_of_bytes(quants: Bytes) -> Bytes:
    """Unpack 4-bit values: the low half of each byte along the last axis, then its high half."""
    return np.stack([quants & 15, quants >> 4], axis=-1).reshape(*quants.shape[:2], -1)


def _five_bits(high: Bytes, low: Bytes) -> npt.NDArray[np.int8]:
    """Unpack 5-bit values: the highest bits are packed in `high`, the other four bits in `low`."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return (_nibbles(low) | fifth << 4).view(np.int8)
