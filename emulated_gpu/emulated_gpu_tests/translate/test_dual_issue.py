"""Dual instructions: any two operations on any registers, against a model in which both read first."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from emulated_gpu.machine_code.decode import decode
from emulated_gpu.translate.dual_issue import dual
from emulated_gpu.translate.operands import Machine
from emulated_gpu.translate.program import Operand, OperandKind, Record

MACHINE = Machine("gfx1100", "rdna3", 32)
MASK = 0xFFFFFFFF
VCC_BIT = 1
NUM_REGISTERS = 6

MOV, CNDMASK, ADD, LSHLREV, AND = 8, 9, 16, 17, 18
OPERATIONS: dict[int, Callable[[int, int], int]] = {
    MOV: lambda a, b: a,
    CNDMASK: lambda a, b: b if VCC_BIT else a,
    ADD: lambda a, b: (a + b) & MASK,
    LSHLREV: lambda a, b: b << (a & 31) & MASK,
    AND: lambda a, b: a & b,
}
CANONICAL = {
    "v_mov_b32": MOV,
    "v_cndmask_b32": CNDMASK,
    "v_add_u32": ADD,
    "v_lshlrev_b32": LSHLREV,
    "v_and_b32": AND,
}

register = st.integers(0, NUM_REGISTERS - 1)
halves = st.tuples(st.sampled_from([MOV, CNDMASK]), register, register)
second_halves = st.tuples(st.sampled_from(sorted(OPERATIONS)), register, register)


def encoded(first: tuple[int, int, int], second: tuple[int, int, int], x: int, y: int) -> bytes:
    """VOPD: the first half has 4 bits of opcode; the second destination has the other parity (RDNA 3 ISA)."""
    low = 0b110010 << 26 | first[0] << 22 | second[0] << 17 | first[2] << 9 | 256 + first[1]
    high = x << 24 | y >> 1 << 17 | second[2] << 9 | 256 + second[1]
    return low.to_bytes(4, "little") + high.to_bytes(4, "little")


def run(records: list[Record], values: list[int]) -> list[int]:
    registers = dict(enumerate(values))

    def read(operand: Operand) -> int:
        assert operand.kind in (OperandKind.VGPR, OperandKind.SGPR)
        return registers[operand.index] if operand.kind is OperandKind.VGPR else VCC_BIT

    for record in records:
        operation = OPERATIONS[CANONICAL[record.operation]]
        sources = [read(each) for each in record.sources]
        registers[record.dst.index] = operation(sources[0], sources[1] if len(sources) > 1 else 0)
    return [registers[index] for index in range(NUM_REGISTERS)]


@given(
    first=halves,
    second=second_halves,
    x=register,
    y=register,
    values=st.lists(st.integers(0, MASK), min_size=6, max_size=6),
)
def test_both_halves_read_before_either_writes(
    first: tuple[int, int, int], second: tuple[int, int, int], x: int, y: int, values: list[int]
) -> None:
    if (x ^ y) & 1 == 0:
        y ^= 1
    (instruction,) = decode(encoded(first, second, x, y), 0, "rdna3")
    records = dual(instruction.shape, MACHINE)
    expected = list(values)
    expected[x] = OPERATIONS[first[0]](values[first[1]], values[first[2]])
    expected[y] = OPERATIONS[second[0]](values[second[1]], values[second[2]])
    assert run(records, values) == expected
    assert sum(record.is_counted for record in records) == 1
