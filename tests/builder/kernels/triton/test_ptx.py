"""The assembly for NVIDIA's GPUs in blocks.py, by an interpreter of the few instructions that it has."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.model.weight_blocks import E2M1

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import blocks

WORD = 0xFFFFFFFF
Registers = dict[str, int]


def run(text: str, packed: int) -> list[float]:
    """The eight f32 that the code makes of four bytes."""
    registers: Registers = {"$8": packed}
    for line in text.replace("{", "").replace("}", "").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, operands = line.split(None, 1)
            target, *sources = operands.replace(" ", "").strip().split(",")
            values = [registers[each] if each in registers else int(each, 0) for each in sources]
            registers[target] = INSTRUCTIONS[name](*values) & WORD
    return [struct.unpack("f", struct.pack("I", registers[f"${number}"]))[0] for number in range(8)]


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


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
}


def halves(packed: int) -> list[int]:
    """The low halves of the bytes, then the high ones."""
    return [packed >> 8 * number + high & 15 for high in (0, 4) for number in range(4)]


@given(st.integers(0, WORD))
def test_integers_of_4_bits_are_above_an_offset(packed: int) -> None:
    expected = [number + blocks.PTX_OFFSET.value for number in halves(packed)]
    assert run(blocks.PTX.value, packed) == expected


@given(st.integers(0, WORD))
def test_floats_of_4_bits_are_above_an_offset(packed: int) -> None:
    expected = [E2M1[bits] + blocks.PTX_FLOAT_OFFSET.value for bits in halves(packed)]
    assert run(blocks.PTX_FLOATS.value, packed) == expected


def test_only_these_instructions_are_interpreted() -> None:
    names = set(re.findall(r"^\s*([a-z][\w.]*) ", blocks.PTX.value + blocks.PTX_FLOATS.value, re.MULTILINE))
    assert names <= INSTRUCTIONS.keys()
