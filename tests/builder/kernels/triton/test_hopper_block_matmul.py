"""The matmuls for Hopper with weights in blocks: compiled, and a thread's widening in an interpreter of PTX.

No GPU and no emulation of one runs the kernels here; bench/tune_matmul.py checks them on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.weights.chosen_layout import block_rows
from shortfin_apps.llm.builder.weights.layout import WeightLayout
from shortfin_apps.llm.model.weight_blocks import MIDDLE, PAIR, Q4_1, Q8_0, BlockType
from tests.builder.lowering.triton.test_hopper_matmul import (
    DOWN,
    HOPPER,
    gate_up,
    linear,
    qkv,
    qkv_in_bytes,
)
from tests.matrices import slow_but

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.kernels.triton import hopper_blocks
from shortfin_apps.llm.builder.lowering.triton.hopper_block_matmul import block_form
from tests.builder.kernels.triton.assembled import overwritten_operands, spilled_bytes, text_with_loads_by_tma
from tests.builder.kernels.triton.test_ptx import executed

BF16 = np.dtype(ml_dtypes.bfloat16)
DEPTH = hopper_blocks.DEPTH.value
Q4_K, Q5_K = BlockType(4, has_minima=True, group=256), BlockType(8, has_minima=True, group=256)
Q6_K = BlockType(8, 16, group=256)


def down(tokens: int, layout: WeightLayout) -> Kernel:
    return linear(tokens, layout, shape=DOWN)


CASES = {
    f"{make.__name__}-{blocks}-{tokens}": (make, blocks, tokens)
    for make in (qkv, qkv_in_bytes, linear, gate_up, down)
    for tokens in (64, 512)
    if tokens == 512 or make not in (linear, down)
    for blocks in (Q4_1, Q8_0, Q5_K, Q6_K)
}


@pytest.mark.parametrize(
    "case", slow_but(["gate_up-q4_b32m-64", "qkv_in_bytes-q4_b32m-64", "down-q8_b16_g256-512"], CASES)
)
def test_the_kernel_assembles_as_ptx_8_4(case: str, tmp_path: Path) -> None:
    make, blocks, tokens = CASES[case]
    kernel = block_form(make(tokens, block_rows(blocks, "bf16", HOPPER)), tokens)
    text = text_with_loads_by_tma(kernel, maps=4 if blocks.has_minima else 3)
    # Epilogues of 128 tokens spill, once a tile.
    assert max(spilled_bytes(text, tmp_path)) <= (1280 if make is qkv_in_bytes else 256)
    assert not overwritten_operands(text, tmp_path)


@pytest.mark.parametrize("blocks", [Q4_1, Q4_K, Q8_0, Q5_K, Q6_K], ids=str)
@given(seed=st.integers(0, 1 << 32), thread=st.integers(0, 3))
def test_a_thread_widens_its_part_of_a_matrix_instruction(blocks: BlockType, seed: int, thread: int) -> None:
    """Its registers have the places that the PTX ISA gives for the first operand of `wgmma`."""
    random = np.random.default_rng(seed)
    least, most = (0, 16) if blocks.bits == 4 else (-128, 128)
    quants = random.integers(least, most, (2, DEPTH))  # of the thread's two rows
    terms = random.standard_normal((2, 2, DEPTH // blocks.size)).astype(BF16)
    scales, minima = (np.repeat(each, blocks.size, axis=1).astype(np.float64) for each in terms)
    values = (quants - (MIDDLE if blocks.bits == 4 else 0)) * scales
    if blocks.has_minima:
        values += minima
    place = np.arange(DEPTH // 4)  # of a row: 2 of each 8 elements of K
    own = place // 2 * 8 + 2 * thread + place % 2
    expected = values[:, own].astype(BF16).reshape(2, -1, 2, 2).transpose(1, 2, 0, 3).ravel()
    given_terms = terms[: blocks.num_terms].transpose(0, 2, 1).reshape(blocks.num_terms, -1)
    found = run(halves(quants, blocks, thread), given_terms.view(np.uint16), DEPTH // 2)
    np.testing.assert_array_equal(found.view(BF16).astype(np.float32), expected.astype(np.float32))


def halves(quants: Any, blocks: BlockType, thread: int) -> Any:
    """What a thread loads of two rows: two bytes at a time, in the order of its registers."""
    data = quants.astype(np.int8).view(np.uint8)
    if blocks.bits == 4:
        low, high = data.reshape(2, -1, 2, PAIR).transpose(2, 0, 1, 3).reshape(2, 2, -1)
        data = low | high << 4
    columns = np.ascontiguousarray(data).view(np.uint16)
    layout = hopper_blocks.packed_layout(columns.shape[1])
    places = [coordinates(layout.reg_bases, n) for n in range(1 << len(layout.reg_bases))]
    return np.array([columns[row // 8, column + thread] for row, column in places])


def coordinates(bases: Sequence[Sequence[int]], number: int) -> tuple[int, int]:
    """The row and column of a register in a linear layout."""
    chosen = [basis for n, basis in enumerate(bases) if number >> n & 1]
    return sum(row for row, _ in chosen), sum(column for _, column in chosen)


def run(packed: Any, terms: Any, count: int) -> Any:
    """Run the widening of a thread; return its 16-bit results."""
    groups = [[f"wide{n}" for n in range(count)], [f"packed{n}" for n in range(len(packed))]]
    groups += [[f"{name}{n}" for n in range(terms.shape[1])] for name in ("s", "m")[: len(terms)]]
    text = hopper_blocks.widening((groups[0],), tuple(groups[1:]))
    text = re.sub(r"mov\.b32 (\w+), \{(.*?)\};", r"pack.b32 \1, \2;", text)
    text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, (\w+);", r"low.b32 \1, \3; high.b32 \2, \3;", text)
    names = [name for group in groups[1:] for name in group]
    values = map(int, np.concatenate([packed, terms.ravel()]))
    registers = executed(text, [], known=dict(zip(names, values, strict=True)))
    return np.array([registers[name] for name in groups[0]], np.uint16)
