"""Weight quantisation: blocks as in GGUF files (q8_0, q4), or bytes (int8, fp8) with one scale per row.

A block is 32 neighbours along a row: `w = scale * q` (8 bits, GGUF's Q8_0) or `w = scale * q + minimum`
(4 bits, GGUF's Q4_1; Q4_0 is the case of `minimum = -8 * scale`). Source: llama.cpp's `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCK = 32

Bits = Literal[8, 4]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block-quantised matrix [rows, columns]; the columns are a multiple of 32.

    `quants` [rows, columns]: i8 with 8 bits, u8 of 0..15 with 4. `scales` and `minima` [rows, columns / 32]
    f16; `minima` is None with 8 bits.
    """

    quants: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16] | None

    @property
    def bits(self) -> Bits:
        return 8 if self.minima is None else 4

    def dequantise(self) -> npt.NDArray[np.float32]:
        rows, columns = self.quants.shape
        values = self.quants.reshape(rows, -1, BLOCK) * self.scales.astype(np.float32)[..., None]
        if self.minima is not None:
            values = values + self.minima.astype(np.float32)[..., None]
        return values.reshape(rows, columns)

    def take_rows(self, rows: npt.NDArray[np.intp]) -> Blocks:
        minima = None if self.minima is None else self.minima[rows]
        return Blocks(self.quants[rows], self.scales[rows], minima)


def quantise(values: npt.NDArray[np.floating], bits: Bits) -> Blocks:
    """Quantises `values` [rows, columns] by rounding to nearest; each block's scale covers its full range."""
    rows, columns = values.shape
    blocks = values.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    if bits == 8:
        minima = None
        scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float16)
        quants = np.rint(blocks * _inverse(scales)).clip(-127, 127).astype(np.int8)
    else:
        minima = blocks.min(axis=2).astype(np.float16)
        scales = ((blocks.max(axis=2) - minima.astype(np.float32)) / 15).astype(np.float16)
        shifted = (blocks - minima.astype(np.float32)[..., None]) * _inverse(scales)
        quants = np.rint(shifted).clip(0, 15).astype(np.uint8)
    return Blocks(quants.reshape(rows, columns), scales, minima)


def quantise_rows(
    values: npt.NDArray[np.floating],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quants [rows, columns] and scales [rows] with `values = quants * scale`; a row's maximum is 127."""
    wide = values.astype(np.float32, copy=False)
    scales = np.abs(wide).max(axis=1) / np.float32(127)
    safe = np.where(scales > 0, scales, 1)
    return np.rint(wide / safe[:, None]).astype(np.int8), scales


def quantise_fp8(
    values: npt.NDArray[np.floating], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Quants [rows, columns] of `dtype`, an 8-bit float, and scales [rows] with `values = quants * scale`.

    A row's largest magnitude becomes the format's largest number.
    """
    wide = values.astype(np.float32, copy=False)
    largest = np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    scales = np.abs(wide).max(axis=1) / largest
    safe = np.where(scales > 0, scales, 1)
    return (wide / safe[:, None]).clip(-largest, largest).astype(dtype), scales


def stack(parts: Sequence[Blocks]) -> Blocks:
    """Concatenates matrices of equal columns and bits along their rows."""
    if len(parts) == 1:
        return parts[0]
    minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        np.concatenate([part.quants for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(minima) if minima else None,
    )


def _inverse(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    wide = scales.astype(np.float32)[..., None]
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
