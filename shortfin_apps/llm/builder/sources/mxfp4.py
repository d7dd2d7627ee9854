"""MXFP4 (OCP Microscaling Formats, version 1.0): 32 floats of 4 bits (e2m1) with a power of two (e8m0).

f16 has scales from 2^-24 to 2^15: weights of smaller ones, all below 1e-6, are rounded, and larger ones
become infinite, which is for callers to refuse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.blocks import E2M1, MXFP4, Blocks, Terms

_HALF_EXPONENT = 128  # of half of 1, which a scale of 1 is for integers that are twice as large

Bytes = npt.NDArray[np.uint8]


def mxfp4_blocks(quants: Bytes, scales: Bytes) -> Blocks:
    """Of `quants` [rows, blocks, 32], each of 4 bits, and `scales` [rows, blocks]."""
    with np.errstate(over="ignore"):
        narrow = np.exp2(scales.astype(np.float32) - _HALF_EXPONENT).astype(np.float16)
    return Blocks(MXFP4, E2M1[quants].reshape(len(quants), -1), Terms(narrow))
