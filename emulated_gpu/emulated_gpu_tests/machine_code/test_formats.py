"""Formats: every opcode of every instruction set is found again by its encoding."""

from __future__ import annotations

import pytest

from emulated_gpu.machine_code.decode import decode
from emulated_gpu.machine_code.formats import Format, InstructionSet, dual_operations, formats_of

# Formats of graphics, whose opcodes no kernel here uses.
_GRAPHICS = ("EXP", "VEXPORT", "MIMG", "VIMAGE", "VSAMPLE")


def all_formats(instruction_set: InstructionSet) -> dict[str, Format]:
    return {each.name: each for candidates in formats_of(instruction_set) for each in candidates}


@pytest.mark.parametrize("instruction_set", ["cdna", "rdna3", "rdna4"])
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


@pytest.mark.parametrize("instruction_set", ["cdna", "rdna3", "rdna4"])
def test_fields_lie_in_the_words_of_their_layout(instruction_set: InstructionSet) -> None:
    for each in all_formats(instruction_set).values():
        for layout in each.layouts.values():
            assert all(mask << low < 1 << 32 * layout.words for _, low, mask in layout.fields)


def test_dual_operations_are_those_of_the_manual() -> None:
    names = {operation.name for operation in dual_operations("rdna3").values()}
    assert names >= {"v_dual_fmac_f32", "v_dual_fmaak_f32", "v_dual_cndmask_b32", "v_dual_and_b32"}
