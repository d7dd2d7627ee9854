"""Formats: every opcode of every instruction set is found again by its encoding."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from emulated_gpu.machine_code.decode import decode
from emulated_gpu.machine_code.formats import Format, InstructionSet, Operation, dual_operations, formats_of

# Formats of graphics, whose opcodes no kernel here uses.
_GRAPHICS = ("EXP", "VEXPORT", "MIMG", "VIMAGE", "VSAMPLE")


def all_formats(instruction_set: InstructionSet) -> dict[str, Format]:
    return {each.name: each for candidates in formats_of(instruction_set) for each in candidates}


@pytest.mark.parametrize("instruction_set", ["cdna2", "cdna", "rdna3", "rdna4"])
def test_every_opcode_decodes_to_its_name_and_format(instruction_set: InstructionSet) -> None:
    num_opcodes = 0
    for each in all_formats(instruction_set).values():
        if each.name in _GRAPHICS:
            continue
        for opcode, operation in each.operations.items():
            if opcode > each.op_mask:
                continue  # of the second half of dual instructions only
            raw = each.value | opcode << each.op_low
            (found, *_) = decode(raw.to_bytes(16, "little"), 0, instruction_set)
            assert found.shape.mnemonic == operation.name
            assert found.shape.format.removesuffix("_SDST") == each.name.removesuffix("_SDST")
            num_opcodes += 1
    assert num_opcodes > 900


@pytest.mark.parametrize("instruction_set", ["cdna2", "cdna", "rdna3", "rdna4"])
def test_fields_lie_in_the_words_of_their_layout(instruction_set: InstructionSet) -> None:
    for each in all_formats(instruction_set).values():
        for layout in each.layouts.values():
            assert all(mask << low < 1 << 32 * layout.words for _, low, mask in layout.fields)


def test_dual_operations_are_those_of_the_manual() -> None:
    names = {operation.name for operation in dual_operations("rdna3").values()}
    assert names >= {"v_dual_fmac_f32", "v_dual_fmaak_f32", "v_dual_cndmask_b32", "v_dual_and_b32"}


# ---- the differences of CDNA 2, by LLVM

_NOP = "0x07 0x00 0x80 0xbf"  # s_nop 7
_FIRST_VGPR = 256


def bytes_of(each: Format, opcode: int, operation: Operation) -> bytes:
    """The operation on v0 and its successors."""
    raw = each.value | opcode << each.op_low
    for name, low, mask in each.layouts[""].fields:
        if name in operation.operands and mask == 0x1FF:
            raw |= _FIRST_VGPR << low
        elif name == "saddr":
            raw |= mask << low  # none
    return raw.to_bytes(16, "little")[: 4 * each.layouts[""].words]


@pytest.mark.parametrize("name", ["VOP1", "VOP2", "VOP3P_MFMA", "GLOBAL"])
def test_llvm_knows_the_operations_of_cdna2_by_these_names(name: str) -> None:
    assembler = shutil.which("llvm-mc-19")
    if assembler is None:
        pytest.skip("llvm-mc of LLVM 19 is not installed")
    each = all_formats("cdna2")[name]
    operations = {
        code: each.operations[code] for code in each.operations if not each.operations[code].needs_literal
    }
    lines = [" ".join(map(hex, bytes_of(each, *row))) + f"\n{_NOP}" for row in operations.items()]
    arguments = [assembler, "-arch=amdgcn", "-mcpu=gfx90a", "-disassemble"]
    done = subprocess.run(arguments, input="\n".join(lines), capture_output=True, text=True, check=True)
    parts = done.stdout.removeprefix("\t.text\n").split("\ts_nop 7\n")[:-1]
    found = [re.sub("_e(32|64)$", "", (part.split() or [""])[0]) for part in parts]
    assert found == [operation.name for operation in operations.values()]
