"""MXFP4 (OCP Microscaling Formats, version 1.0): 32 floats of 4 bits (e2m1) with a power of two (e8m0).

f16 represents scales from 2^-24 to 2^15. Weights with smaller scales, all below 1e-6, are rounded; larger
scales become infinite, which callers must reject.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.weight_blocks import E2M1, MXFP4, Blocks, Terms

_HALF_EXPONENT = 128  # e8m0's bias of 127, plus 1 to halve the scale, as E2M1 has doubled values

Bytes = npt.NDArray[np.uint8]


def mxfp4_blocks(quants: Bytes, scales: Bytes) -> Blocks:
    """Create blocks from 4-bit `quants` [rows, blocks, 32] and `scales` [rows, blocks]."""
    with np.errstate(over="ignore"):
        narrow = np.exp2(scales.astype(np.float32) - _HALF_EXPONENT).astype(np.float16)
    return Blocks(MXFP4, E2M1[quants].reshape(len(quants), -1), Terms(narrow))
