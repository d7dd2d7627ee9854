"""Weight quantisation: blocks as in GGUF files (q8_0, q4), or bytes (int8, fp8) with one scale per row.

A block is 32 neighbours along a row, as in GGUF's Q8_0 and Q4_1. Source: llama.cpp's `ggml-quants.c`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.weight_blocks import BLOCK, Q4_1, Q8_0, Bits, Blocks, Terms


def quantise(values: npt.NDArray[np.floating], bits: Bits) -> Blocks:
    """Quantise `values` [rows, columns] to blocks of type Q8_0 (8 bits) or Q4_1 (4 bits).

    Rounds to nearest; each block's scale covers the block's full range. `columns` must be a multiple of 32.
    """
    rows, columns = values.shape
    blocks = values.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    if bits == 8:
        scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float16)
        signed = np.rint(blocks * _inverse(scales)).clip(-127, 127).astype(np.int8)
        return Blocks(Q8_0, signed.reshape(rows, columns), Terms(scales))
    minima = blocks.min(axis=2).astype(np.float16)
    scales = ((blocks.max(axis=2) - minima.astype(np.float32)) / 15).astype(np.float16)
    shifted = (blocks - minima.astype(np.float32)[..., None]) * _inverse(scales)
    quants = np.rint(shifted).clip(0, 15).astype(np.uint8)
    return Blocks(Q4_1, quants.reshape(rows, columns), Terms(scales), Terms(minima))


def quantise_rows(values: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return int8 quants [rows, columns] and scales [rows], so that `values = quants * scale`.

    A row's largest magnitude maps to 127.
    """
    wide = values.astype(np.float32, copy=False)
    scales = np.abs(wide).max(axis=1) / np.float32(127)
    safe = np.where(scales > 0, scales, 1)
    return np.rint(wide / safe[:, None]).astype(np.int8), scales


def quantise_fp8(
    values: npt.NDArray[np.floating], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Return 8-bit float quants [rows, columns] of `dtype` and scales [rows]: `values = quants * scale`.

    A row's largest magnitude maps to the format's largest finite value.
    """
    wide = values.astype(np.float32, copy=False)
    largest = np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    scales = np.abs(wide).max(axis=1) / largest
    safe = np.where(scales > 0, scales, 1)
    return (wide / safe[:, None]).clip(-largest, largest).astype(dtype), scales


def _inverse(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    wide = scales.astype(np.float32)[..., None]
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
