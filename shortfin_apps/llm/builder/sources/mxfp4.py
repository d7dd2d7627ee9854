"""MXFP4 (OCP Microscaling Formats, version 1.0): 32 floats of 4 bits (e2m1) with a power of two (e8m0).

Twice each value is an integer, so that blocks of integers hold them as they are. f16 has scales from 2^-24 to
2^15: weights of smaller ones, all below 1e-6, are rounded, and larger ones are refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.blocks import Q8_0, Blocks, Terms
from shortfin_apps.llm.builder.sources.base import as_float

MXFP4 = Q8_0
_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
_HALF_EXPONENT = 128  # of half of 1, which a scale of 1 is for integers that are twice as large

Bytes = npt.NDArray[np.uint8]


def read_mxfp4(where: str, quants: Bytes, scales: Bytes) -> Blocks:
    """Blocks of `quants` [rows, blocks, 32], each of 4 bits, and `scales` [rows, blocks].

    Raises BuildError, `where` naming the matrix.
    """
    with np.errstate(over="ignore"):  # what is infinite is refused
        narrow = np.exp2(scales.astype(np.float32) - _HALF_EXPONENT).astype(np.float16)
    return Blocks(MXFP4, _TWICE[quants].reshape(len(quants), -1), Terms(as_float(where, narrow)))
