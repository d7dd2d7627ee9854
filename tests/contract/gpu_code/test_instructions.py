"""The emulated GPU decodes and translates every instruction of `random:tiny`, as LLVM disassembles it."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from emulated_gpu.chips import CHIPS as EMULATED
from emulated_gpu.machine_code.code_object import CodeObject, read_code_object
from emulated_gpu.machine_code.decode import Instruction, decode
from emulated_gpu.translate.kernel import translate, translate_instruction
from emulated_gpu.translate.operands import EXEC, M0, VCC, Machine
from emulated_gpu.translate.program import FIRST_TEMPORARY, Class, OperandKind, Record
from tests.code_objects import CHIPS, DISASSEMBLED, disassembled, tiny_code_objects
from tests.conftest import BuildTiny


def instructions_of(code_object: CodeObject) -> list[list[Instruction]]:
    instruction_set = EMULATED[code_object.chip].instruction_set
    return [list(decode(kernel.code, kernel.entry, instruction_set)) for kernel in code_object.kernels]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_decodes_every_word_of_every_kernel(build_tiny: BuildTiny, chip: str) -> None:
    for code_object in map(read_code_object, tiny_code_objects(build_tiny, chip)):
        for kernel, instructions in zip(code_object.kernels, instructions_of(code_object), strict=True):
            assert not [each for each in instructions if each.shape.mnemonic.startswith("invalid_")]
            assert 4 * sum(each.shape.words for each in instructions) == len(kernel.code)
            ends = [each.address + 4 * each.shape.words for each in instructions]
            assert [each.address for each in instructions] == [kernel.entry, *ends[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("chip", DISASSEMBLED)
def test_agrees_with_llvm_on_names_and_lengths(build_tiny: BuildTiny, chip: str, tmp_path: Path) -> None:
    num_compared = 0
    for image in tiny_code_objects(build_tiny, chip):
        lines = disassembled(image, tmp_path)
        for each in chain.from_iterable(instructions_of(read_code_object(image))):
            if (line := lines.get(each.address)) is not None:
                assert (each.shape.mnemonic, each.shape.words) == (line.mnemonic, line.words)
                num_compared += 1
    assert num_compared > 10_000


@pytest.mark.emulated
@pytest.mark.parametrize("chip", CHIPS)
def test_translates_every_instruction(build_tiny: BuildTiny, chip: str) -> None:
    images = tiny_code_objects(build_tiny, chip)
    for program in chain.from_iterable(translate(read_code_object(image)) for image in images):
        records = program.records
        assert not [each.operation for each in records if each.operation.startswith("unknown:")]
        assert 4 * sum(each.words for each in records) == len(program.kernel.code)
        branches = [each for each in records if each.kind is Class.BRANCH]
        assert all(-1 <= each.target < len(records) for each in branches)
        assert records[-1].operation in ("s_endpgm", "s_nop", "s_branch")


# ---- registers, as LLVM prints them


_REGISTERS = re.compile(
    r"(?<![a-z0-9_])(?:(?P<kind>[vsa])(?:\[(?P<first>\d+):(?P<last>\d+)\]|(?P<one>\d+))"
    r"|ttmp(?P<trap>\d+)|(?P<name>vcc|exec)(?P<part>_lo|_hi)?|(?P<m0>m0))(?![\w])"
)
FIRST_TRAP_REGISTER = 108
_IMPLICIT = {
    "v_div_fmas_f32": {VCC},
    "v_cndmask_b32": {VCC},  # in dual instructions
}


def printed_registers(operands: str) -> set[tuple[str, int, int]]:
    """Kind, number (accumulation registers from 256) and count."""
    found = set()
    for match in _REGISTERS.finditer(operands):
        if match["m0"]:
            found.add(("s", M0, 1))
        elif match["trap"]:
            found.add(("s", FIRST_TRAP_REGISTER + int(match["trap"]), 1))
        elif match["name"]:
            first = {"vcc": VCC, "exec": EXEC}[match["name"]] + (match["part"] == "_hi")
            found.add(("s", first, 1 if match["part"] else 2))
        else:
            first = int(match["first"] or match["one"])
            last = int(match["last"] or first)
            is_accumulation = match["kind"] == "a"
            found.add(("s" if match["kind"] == "s" else "v", first + 256 * is_accumulation, last - first + 1))
    return found


def registers_of(records: list[Record]) -> set[tuple[str, int, int]]:
    letters = {OperandKind.SGPR: "s", OperandKind.VGPR: "v"}
    return {
        (letters[each.kind], each.index, each.dwords)
        for record in records
        for each in (record.dst, record.dst2, *record.sources)
        if each.kind in letters and each.index < FIRST_TEMPORARY
    }


def implicit_registers(records: list[Record]) -> set[int]:
    names = {record.operation for record in records}
    found = {register for name in names for register in _IMPLICIT.get(name, ())}
    return found | ({EXEC, VCC} if any(name.startswith("v_cmpx_") for name in names) else set())


@pytest.mark.emulated
@pytest.mark.parametrize("chip", DISASSEMBLED)
def test_registers_and_their_counts_agree_with_llvm(build_tiny: BuildTiny, chip: str, tmp_path: Path) -> None:
    num_compared = 0
    for image in tiny_code_objects(build_tiny, chip):
        lines = disassembled(image, tmp_path)
        for kernel in read_code_object(image).kernels:
            machine = Machine(chip, EMULATED[chip].instruction_set, kernel.lanes)
            for instruction in decode(kernel.code, kernel.entry, machine.instruction_set):
                if (line := lines.get(instruction.address)) is None:
                    continue
                records = translate_instruction(instruction, machine)
                printed, ours = printed_registers(line.operands), registers_of(records)
                assert printed <= ours, (line, records)
                assert {each[1] for each in ours - printed} <= implicit_registers(records), records
                num_compared += len(ours)
    assert num_compared > 10_000
