"""The assembly for NVIDIA's GPUs in blocks.py and byte_attention.py, in an interpreter of PTX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.model.weight_blocks import E2M1

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import blocks, byte_attention

WORD = 0xFFFFFFFF
ONES = 0x3C003C00  # of f16
Registers = dict[str, int]
Floats = npt.NDArray[np.float32]
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
CODES = [
    (blocks.PTX_BF16, range(-8, 8), BF16),
    (blocks.PTX_F16, range(-8, 8), F16),
    (blocks.PTX_FLOATS_BF16, E2M1, BF16),
    (blocks.PTX_FLOATS_F16, E2M1, F16),
]


def run(text: str, packed: int, scales: Floats, addends: Floats, dtype: np.dtype[Any]) -> Floats:
    """The eight floats that the code makes of four bytes, each with a scale and an addend."""
    registers = executed(text, [packed, *pairs(scales, dtype), *pairs(addends, dtype)])
    return numbers([registers[f"${number}"] for number in range(4)], dtype)


def executed(text: str, operands: Sequence[int], first: int = 4, known: Registers | None = None) -> Registers:
    """The registers after the code has run with these operands, the first of which has this number.

    `known`: values of other registers.
    """
    registers = {f"${first + number}": value for number, value in enumerate(operands)} | (known or {})
    text = re.sub(r"mov\.b32 \{.*?\}, \w+;", "", text)  # a word apart into its halves
    for line in text.replace("{", "").replace("}", "").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, operands_text = line.split(None, 1)
            target, *sources = operands_text.replace(" ", "").strip().split(",")
            values = [registers[each] if each in registers else int(each, 0) for each in sources]
            registers[target] = INSTRUCTIONS[name](*values) & WORD
    return registers


def pairs(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> list[int]:
    """Words of two floats of 16 bits."""
    return [int(each) for each in values.astype(dtype).view(np.uint32)]


def numbers(words: list[int], dtype: np.dtype[Any]) -> Floats:
    return np.array(words, np.uint32).view(dtype).astype(np.float32)


def permuted(low: int, high: int, selector: int) -> int:
    """Four of eight bytes, or with a selector's fourth bit their signs (`prmt` in NVIDIA's PTX ISA)."""
    both, result = high << 32 | low, 0
    for number in range(4):
        own = selector >> 4 * number & 15
        byte = both >> 8 * (own & 7) & 255
        result |= (255 * (byte >> 7) if own & 8 else byte) << 8 * number
    return result


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """Of the bits of three words, those that the `table` has (`lop3`)."""
    bits = (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1)) & 1 for n in range(32))
    return sum(bit << n for n, bit in enumerate(bits))


def multiplied_and_added(dtype: np.dtype[Any]) -> Callable[..., int]:
    """Two products plus addends, rounded once: they are exact in f64, as the inputs have few bits."""

    def fused(*words: int) -> int:
        x, y, addend = (numbers([word], dtype).astype(np.float64) for word in words)
        return pairs(x * y + addend, dtype)[0]

    return fused


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "pack.b32": lambda low, high: high << 16 | low,
    "low.b32": lambda a: a & 0xFFFF,
    "high.b32": lambda a: a >> 16,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "fma.rn.bf16x2": multiplied_and_added(BF16),
    "fma.rn.f16x2": multiplied_and_added(F16),
    "add.f16x2": lambda a, b: multiplied_and_added(F16)(a, ONES, b),
}


def halves(packed: int) -> list[int]:
    """The low halves of the bytes, then the high ones."""
    return [packed >> 8 * number + high & 15 for high in (0, 4) for number in range(4)]


@pytest.mark.parametrize(("code", "values", "dtype"), CODES)
@given(packed=st.integers(0, WORD), seed=st.integers(0, 99))
def test_codes_of_4_bits_become_floats_of_16_bits(
    code: Any, values: Sequence[int], dtype: np.dtype[Any], packed: int, seed: int
) -> None:
    """Each product plus addend is rounded once; a byte's two halves share both."""
    rng = np.random.default_rng(seed)
    scales, addends = (rng.standard_normal(4).astype(dtype).astype(np.float32) for _ in range(2))
    quants = np.array([values[bits] for bits in halves(packed)], np.float64)
    expected = quants * np.tile(scales, 2) + np.tile(addends, 2)
    np.testing.assert_array_equal(
        run(code.value, packed, scales, addends, dtype), expected.astype(dtype).astype(np.float32)
    )


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_bytes_are_multiplied_and_added_in_bf16(first: int) -> None:
    """Each product plus addend is rounded once."""
    scales, addends = np.random.default_rng(first).standard_normal((2, 4)).astype(BF16)
    word = int.from_bytes(range(first, first + 4), "little")
    operands = [word, *pairs(scales, BF16), *pairs(addends, BF16)]
    registers = executed(blocks.PTX_BYTES.value, operands, first=2)
    quants = np.arange(first, first + 4).astype(np.uint8).view(np.int8).astype(np.float64)
    sums = quants * scales.astype(np.float64) + addends.astype(np.float64)
    expected = sums.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(numbers([registers["$0"], registers["$1"]], BF16), expected)


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_bytes_become_floats_of_the_same_value(first: int) -> None:
    word = int.from_bytes(range(first, first + 4), "little")
    registers = executed(byte_attention._TO_F16.value, [word])
    expected = np.arange(first, first + 4).astype(np.uint8).view(np.int8)
    assert numbers([registers["low"], registers["high"]], F16).tolist() == expected.tolist()


def test_only_these_instructions_are_interpreted() -> None:
    others = [blocks.PTX_BYTES.value, byte_attention._TO_F16.value]
    text = "".join([*(code.value for code, *_ in CODES), *others])
    assert set(re.findall(r"^\s*([a-z][\w.]*) ", text, re.MULTILINE)) <= INSTRUCTIONS.keys()
