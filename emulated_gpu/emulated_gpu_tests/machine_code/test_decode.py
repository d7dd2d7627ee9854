"""Decoding of words by hand."""

from __future__ import annotations

import pytest

from emulated_gpu.machine_code.decode import Shape, decode
from emulated_gpu.machine_code.formats import InstructionSet


def one(instruction_set: InstructionSet, *words: int) -> Shape:
    code = b"".join(word.to_bytes(4, "little") for word in words)
    (instruction,) = decode(code, 0, instruction_set)
    return instruction.shape


# Encodings put together by hand from the manuals' tables of fields.
@pytest.mark.parametrize(
    ("instruction_set", "words", "mnemonic", "modifier"),
    [
        # VOP2: opcode 52 << 25 | vdst 1 << 17 | vsrc1 3 << 9 | src0 2 (an SGPR)
        ("cdna", [52 << 25 | 1 << 17 | 3 << 9 | 2], "v_add_u32", ""),
        ("cdna", [52 << 25 | 1 << 17 | 3 << 9 | 255, 0x12345678], "v_add_u32", "LIT"),
        ("cdna", [1 << 25 | 1 << 17 | 3 << 9 | 249, 0x06060602], "v_add_f32", "SDWA"),
        ("cdna", [1 << 25 | 1 << 17 | 3 << 9 | 250, 0xFF00B102], "v_add_f32", "DPP16"),
        ("rdna3", [3 << 25 | 1 << 17 | 3 << 9 | 250, 0xFF00B102], "v_add_f32", "DPP16"),
        ("rdna3", [3 << 25 | 1 << 17 | 3 << 9 | 233, 0x05397702], "v_add_f32", "DPP8"),
        ("rdna3", [3 << 25 | 1 << 17 | 3 << 9 | 234, 0x05397702], "v_add_f32", "DPP8"),
        # v_fmaak_f32 has a literal though no source says so
        ("rdna3", [45 << 25 | 1 << 17 | 3 << 9 | 256, 0x40490FDB], "v_fmaak_f32", "LIT"),
        # VOP3 under DPP has a third word
        ("rdna3", [0xD5030001, 0x000206FA, 0xFF00B102], "v_add_f32", "DPP16"),
        # VOPD: 0b110010 << 26 | opx 3 << 22 | opy 4 << 17; srcy0 says that a literal follows
        ("rdna3", [0xC8C80501, 0x00020AFF, 0x40490FDB], "v_dual_mul_f32", "LIT"),
        # the second half alone is v_dual_fmaak_f32 (opcode 1)
        ("rdna3", [0xC8C20501, 0x00020A00, 0x40490FDB], "v_dual_mul_f32", "LIT"),
        # SOPP s_endpgm: 0b101111111 << 23 | opcode << 16
        ("cdna", [0xBF810000], "s_endpgm", ""),
        ("rdna3", [0xBFB00000], "s_endpgm", ""),
        # MUBUF and VBUFFER, which tinygrad's own decoder leaves out
        ("rdna3", [0xE0500000, 0x80000100], "buffer_load_b32", ""),
        ("rdna4", [0xC405007C, 0x00800001, 0x00000000], "buffer_load_b32", ""),
    ],
)
def test_decodes(instruction_set: InstructionSet, words: list[int], mnemonic: str, modifier: str) -> None:
    shape = one(instruction_set, *words)
    assert (shape.mnemonic, shape.modifier, shape.words) == (mnemonic, modifier, len(words))


def test_names_the_fields() -> None:
    shape = one("cdna", 52 << 25 | 1 << 17 | 3 << 9 | 2)
    assert shape.fields == {"op": 52, "vdst": 1, "vsrc1": 3, "src0": 2}


def test_a_word_that_starts_no_instruction_is_invalid_and_decoding_goes_on() -> None:
    code = (0xFFFFFFFF).to_bytes(4, "little") + (0xBF810000).to_bytes(4, "little")
    assert [each.shape.mnemonic for each in decode(code, 0, "cdna")] == ["invalid_ffffffff", "s_endpgm"]


def test_an_instruction_cut_off_at_the_end_of_the_code_ends_it() -> None:
    (instruction,) = decode((0xDC508000).to_bytes(4, "little"), 0, "cdna")
    assert instruction.shape.mnemonic == "global_load_dword"
