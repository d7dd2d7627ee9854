"""Weights in blocks of any type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.quantise import quantise
from shortfin_apps.llm.model.weight_blocks import E2M1, MXFP4, Q4_1, Q8_0, Blocks, BlockType, Terms

# Besides Q8_0 and Q4_1: those of GGUF's types, and of tensors of several types that are stacked.
GROUPED = (
    BlockType(4, 16, has_minima=True, group=256),
    BlockType(4, has_minima=True, group=256),
    BlockType(8, 16, group=256),
    BlockType(8, has_minima=True, group=256),
    BlockType(8, 16, has_minima=True, group=32),
    BlockType(8, group=32),
)
# Of scales and of minima: the f16, and the range of their integers. IQ1_S has minima of up to 105 units.
_TERMS = ((1.0, (-31, 64)), (-7.0, (-105, 106)))
BLOCK_TYPES = (Q8_0, Q4_1, MXFP4, BlockType(8, has_minima=True), *GROUPED)


def random_blocks(values: npt.NDArray[Any], kind: BlockType) -> Blocks:
    """`values` quantised, or where `quantise` does not make such blocks, others with their deviation."""
    if kind in (Q8_0, Q4_1):
        return quantise(values, kind.bits)
    rng = np.random.default_rng(sum(values.shape))
    low, high = (-128, 128) if kind.bits == 8 else (0, 16)
    quants = rng.integers(low, high, values.shape, np.int8)
    if kind.is_e2m1:
        quants = E2M1[quants]
    terms = [_terms(rng, values.shape, kind, *of_term) for of_term in _TERMS[: kind.num_terms]]
    is_signed = kind.bits == 8 or kind.is_e2m1
    made = Blocks(kind, quants if is_signed else quants.view(np.uint8), *terms)
    unit = np.float32(values.std() / made.dequantise().std())
    fitted = [replace(each, values=(unit * each.values).astype(np.float16)) for each in made.terms]
    return Blocks(kind, made.quants, *fitted)


def _terms(
    rng: np.random.Generator, shape: tuple[int, ...], kind: BlockType, scale: float, integers: tuple[int, int]
) -> Terms:
    rows, columns = shape
    values = (scale * rng.uniform(0.5, 1.5, (rows, columns // kind.spread))).astype(np.float16)
    if kind.group is None:
        return Terms(values)
    return Terms(values, rng.integers(*integers, (rows, columns // kind.size), np.int8))
