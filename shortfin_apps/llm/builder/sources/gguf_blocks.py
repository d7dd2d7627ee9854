"""Reads the quantised blocks of a GGUF tensor (llama.cpp's `ggml/src/ggml-common.h`: block_q8_0, block_q4_0
and block_q4_1: f16 terms, then the quants of 32 weights)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, ReaderTensor

from shortfin_apps.llm.builder.quantise import BLOCK, Blocks
from shortfin_apps.llm.builder.sources.base import Quantisation

_FLOATS = ("F64", "F32", "F16", "BF16")
_KEPT = ("Q8_0", "Q4_0", "Q4_1")  # `read_blocks`
_FEW_BITS = re.compile(r"(I?Q|TQ|MXFP|NVFP)[1-4](_.*)?")
_F16 = np.dtype("<f2")


def read_blocks(tensor: ReaderTensor) -> Blocks | None:
    """The blocks of a matrix in Q8_0, Q4_0 or Q4_1; None for other types."""
    columns = int(tensor.shape[0])
    match tensor.tensor_type:
        case GGMLQuantizationType.Q8_0:
            terms, quants = _split(tensor, columns, 1)
            return Blocks(quants.view(np.int8).reshape(-1, columns), terms[..., 0], None)
        case GGMLQuantizationType.Q4_0:
            terms, quants = _split(tensor, columns, 1)
            scales = terms[..., 0]
            return Blocks(_nibbles(quants).reshape(-1, columns), scales, scales * np.float16(-8))
        case GGMLQuantizationType.Q4_1:
            terms, quants = _split(tensor, columns, 2)
            return Blocks(_nibbles(quants).reshape(-1, columns), terms[..., 0], terms[..., 1])
    return None


def quantisation_of(tensors: Iterable[ReaderTensor]) -> Quantisation | None:
    """The quantisation of the type that most weights have; None where that is a float type."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    name = max(weights, key=lambda kind: weights[kind], default=_FLOATS[0])
    if name in _FLOATS:
        return None
    return Quantisation(name, "q4" if _FEW_BITS.fullmatch(name) else "q8_0", name in _KEPT)


def _split(
    tensor: ReaderTensor, columns: int, num_terms: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """Splits blocks into terms [rows, blocks, terms] and the bytes of the quants [rows, blocks, bytes]."""
    data = np.asarray(tensor.data, np.uint8)
    size = data.size // (int(tensor.n_elements) // BLOCK)
    blocks = np.ascontiguousarray(data).reshape(-1, columns // BLOCK, size)
    head = num_terms * _F16.itemsize
    terms = np.ascontiguousarray(blocks[..., :head]).view(_F16).astype(np.float16)
    return terms, np.ascontiguousarray(blocks[..., head:])


def _nibbles(quants: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpacks 4-bit values: byte j of a block has element j in its low and j + 16 in its high bits."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)
