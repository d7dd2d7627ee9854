"""The blocks of GGUF's types against the `gguf` package's values of the same bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, ReaderField, ReaderTensor, dequantize

from shortfin_apps.llm.builder.sources.gguf_blocks import block_type_of, quantisation_of, read_blocks
from tests.builder.gguf_data import random_data

ROWS, COLUMNS = 6, 512
NAMES = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "MXFP4",
    "IQ4_XS",
)


def tensor(name: str, shape: tuple[int, ...], data: npt.NDArray[np.uint8] | None = None) -> ReaderTensor:
    """Of `shape` as GGUF has it, the columns first."""
    held = np.zeros(0, np.uint8) if data is None else data
    sizes, kind = np.array(shape, np.uint32), GGMLQuantizationType[name]
    return ReaderTensor("x", kind, sizes, int(sizes.prod()), held.nbytes, 0, held, ReaderField(0, "x"))


def tensor_of(name: str, seed: int = 0) -> ReaderTensor:
    """Random blocks, whose terms are what weights have."""
    return tensor(name, (COLUMNS, ROWS), random_data(GGMLQuantizationType[name], ROWS, COLUMNS, seed))


def values_of(blocks: ReaderTensor) -> npt.NDArray[np.float32]:
    return dequantize(blocks.data, blocks.tensor_type).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_kept(name: str) -> None:
    stored = tensor_of(name)
    blocks = read_blocks(stored)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.dequantise(), values_of(stored))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_have_the_type_that_is_said(name: str) -> None:
    blocks = read_blocks(tensor_of(name))
    assert blocks is not None
    assert blocks.type == block_type_of(GGMLQuantizationType[name])


@pytest.mark.parametrize("name", ["F32", "BF16", "IQ3_S", "TQ1_0"])
def test_other_types_have_no_blocks(name: str) -> None:
    assert read_blocks(tensor(name, (256, 1))) is None


@pytest.mark.parametrize(
    ("name", "weights", "kept"),
    [("Q4_K", "q4", True), ("Q6_K", "q8_0", True), ("IQ2_S", "q4", False), ("IQ4_XS", "q8_0", True)],
)
def test_a_quantisation_is_that_of_most_weights(name: str, weights: str, kept: bool) -> None:
    found = quantisation_of([tensor("F32", (32,)), tensor(name, (256, 4))])
    assert found is not None
    assert (found.name, found.weights, found.kept) == (name, weights, kept)
