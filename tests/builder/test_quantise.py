"""Compares quantisation with the `gguf` package, which does the same as llama.cpp."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shortfin_apps.llm.builder.quantise import quantise, quantise_fp8, quantise_rows
from shortfin_apps.llm.model.weight_blocks import BLOCK, Bits, stack

F32 = npt.NDArray[np.float32]
MATRICES = arrays(np.float32, (3, 2 * BLOCK), elements=st.floats(-100, 100, width=32))


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES)
def test_the_error_is_at_most_half_a_step(bits: Bits, matrix: F32) -> None:
    blocks = quantise(matrix, bits)
    step = np.repeat(blocks.scales.wide(), BLOCK, axis=1)
    rounding = 2.0**-10 * np.abs(matrix).max() + 1e-6  # rounding of the terms to f16
    assert (np.abs(blocks.dequantise() - matrix) <= step / 2 + 3 * rounding).all()


@pytest.mark.parametrize(("bits", "kind"), [(8, GGMLQuantizationType.Q8_0), (4, GGMLQuantizationType.Q4_1)])
def test_as_accurate_as_the_reference(bits: Bits, kind: GGMLQuantizationType) -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    reference = quants.dequantize(quants.quantize(matrix, kind), kind)
    ours = quantise(matrix, bits).dequantise()
    assert np.square(ours - matrix).mean() <= 1.01 * np.square(reference - matrix).mean()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_constant_block_is_exact(bits: Bits) -> None:
    matrix = np.full((1, BLOCK), 0.5, np.float32)
    np.testing.assert_allclose(quantise(matrix, bits).dequantise(), matrix, rtol=1e-3)
    np.testing.assert_array_equal(quantise(0 * matrix, bits).dequantise(), 0 * matrix)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_independent(bits: Bits) -> None:
    matrix = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    whole = quantise(matrix, bits)
    parts = stack([quantise(matrix[:2], bits), quantise(matrix[2:], bits)])
    np.testing.assert_array_equal(whole.dequantise(), parts.dequantise())
    order = np.array([3, 0, 5])
    np.testing.assert_array_equal(whole.take_rows(order).dequantise(), whole.dequantise()[order])


@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES)
def test_int8_rows_have_half_a_step_of_error_and_reach_127(matrix: F32) -> None:
    quants, scales = quantise_rows(matrix)
    off = np.abs(quants * scales[:, None] - matrix)
    largest = np.abs(quants.astype(np.int32)).max(axis=1)
    clear = scales > 1e-30  # smaller ones are not exact themselves
    assert (off[clear] <= 0.5001 * scales[clear, None]).all()
    assert (largest[clear] == 127).all()
    assert (off[~clear] <= 1e-27).all()


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz])
@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES)
def test_fp8_rows_keep_four_bits_and_reach_the_largest_number(kind: type, matrix: F32) -> None:
    """Of numbers that are not denormal: a mantissa of three bits is off by 2^-4 at most."""
    dtype = np.dtype(kind)
    quants, scales = quantise_fp8(matrix, dtype)
    found = quants.astype(np.float32) * scales[:, None]
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    smallest = np.float32(limits.smallest_normal)
    normal = (np.abs(matrix) >= smallest * scales[:, None]) & (scales[:, None] > 1e-30)
    assert (np.abs(found - matrix) <= np.abs(matrix) * 2.0**-4 * 1.001)[normal].all()
    largest = np.abs(quants.astype(np.float32)).max(axis=1)
    assert (largest == np.float32(limits.max))[scales > 1e-30].all()
    np.testing.assert_array_equal(found[scales == 0], 0)
