"""The blocks of GGUF's types against the `gguf` package's values of the same bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderField, ReaderTensor, dequantize

from shortfin_apps.llm.builder.sources.gguf_blocks import bits_of, quantisation_of, read_blocks

ROWS, COLUMNS = 6, 512
EXACT = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_NL")
ROUNDED = ("Q4_K", "IQ4_XS")  # whose scales are products
TERMS = {"Q4_1": 2, "Q4_K": 2}  # f16 numbers at a block's beginning; others have one


def tensor(name: str, shape: tuple[int, ...], data: npt.NDArray[np.uint8] | None = None) -> ReaderTensor:
    """Of `shape` as GGUF has it, the columns first."""
    held = np.zeros(0, np.uint8) if data is None else data
    sizes, kind = np.array(shape, np.uint32), GGMLQuantizationType[name]
    return ReaderTensor("x", kind, sizes, int(sizes.prod()), held.nbytes, 0, held, ReaderField(0, "x"))


def tensor_of(name: str, seed: int = 0) -> ReaderTensor:
    """Random blocks, whose terms are what weights have."""
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // block, size), dtype=np.uint8)
    terms = rng.uniform(1e-3, 2e-2, (len(blocks), TERMS.get(name, 1))).astype(np.float16)
    blocks[:, : 2 * terms.shape[1]] = terms.view(np.uint8)
    return tensor(name, (COLUMNS, ROWS), blocks.reshape(ROWS, -1))


def values_of(blocks: ReaderTensor) -> npt.NDArray[np.float32]:
    return dequantize(blocks.data, blocks.tensor_type).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("name", EXACT)
def test_blocks_of_32_keep_every_value(name: str) -> None:
    stored = tensor_of(name)
    blocks = read_blocks(stored)
    assert blocks is not None
    np.testing.assert_allclose(blocks.dequantise(), values_of(stored), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_super_blocks_keep_every_quant_and_round_their_scales(name: str) -> None:
    stored = tensor_of(name)
    blocks, values = read_blocks(stored), values_of(stored)
    assert blocks is not None
    error = np.linalg.norm(blocks.dequantise() - values) / np.linalg.norm(values)
    assert error < 3e-4


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_blocks_have_the_bits_that_are_said(name: str) -> None:
    blocks = read_blocks(tensor_of(name))
    assert blocks is not None
    assert blocks.bits == bits_of(GGMLQuantizationType[name])


@pytest.mark.parametrize("name", ["F32", "BF16", "Q5_1", "Q5_K", "Q6_K", "Q3_K"])
def test_other_types_have_no_blocks(name: str) -> None:
    assert read_blocks(tensor(name, (256, 1))) is None


@pytest.mark.parametrize(
    ("name", "weights", "kept"),
    [("Q4_K", "q4", True), ("Q6_K", "q8_0", False), ("Q2_K", "q4", False), ("IQ4_XS", "q8_0", True)],
)
def test_a_quantisation_is_that_of_most_weights(name: str, weights: str, kept: bool) -> None:
    found = quantisation_of([tensor("F32", (32,)), tensor(name, (256, 4))])
    assert found is not None
    assert (found.name, found.weights, found.kept) == (name, weights, kept)
