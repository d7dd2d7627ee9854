"""Translation of instructions and kernels, against hand-checked rows and against LLVM's assembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu.machine_code.code_object import Descriptor, Kernel
from emulated_gpu.translate import translate_code
from emulated_gpu.translate.kernel import translate_kernel
from emulated_gpu.translate.operands import Machine
from emulated_gpu.translate.program import MAGIC, Class
from emulated_gpu_tests.translate.rendering import rendered, translated

FOLDER = Path(__file__).parent
KNOWN_TO_LLVM_19 = ("gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201")
RECORDED = (*KNOWN_TO_LLVM_19, "gfx950")


def rows(chip: str) -> list[list[str]]:
    """Assembly, words, records."""
    lines = (FOLDER / f"records_{chip}.txt").read_text().splitlines()
    return [re.split(r" \| ", line) for line in lines if not line.startswith("#")]


ROWS = [pytest.param(chip, *row[1:], id=f"{chip} {row[0]}") for chip in RECORDED for row in rows(chip)]


@pytest.mark.parametrize(("chip", "words", "expected"), ROWS)
def test_instruction(chip: str, words: str, expected: str) -> None:
    assert rendered(translated(chip, words)) == expected


@pytest.mark.parametrize("chip", KNOWN_TO_LLVM_19)
def test_the_words_of_the_rows_are_those_of_llvm(chip: str) -> None:
    assembler = shutil.which("llvm-mc-19")
    if assembler is None:
        pytest.skip("llvm-mc of LLVM 19 is not installed; others spell some instructions differently")
    listed = [row for row in rows(chip) if ".h" not in row[0]]  # which it reads only with an option
    text = "\n".join(row[0] for row in listed)
    arguments = [assembler, "-arch=amdgcn", f"-mcpu={chip}", "-show-encoding"]
    output = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout
    encodings = [
        each.replace("0x", "").replace(",", "") for each in re.findall(r"encoding: \[(.*)\]", output)
    ]
    assert encodings == [row[1].replace(" ", "") for row in listed]


# ---- whole kernels


def kernel_of(code: bytes, entry: int = 0) -> Kernel:
    return Kernel("code", Descriptor(*[0] * 9), (), 64, 0, 0, 0, 0, 0, 64, None, entry, code)


def code_of(*words: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words)


S_NOP, S_ENDPGM = 0xBF800000, 0xBF810000
CDNA = Machine("gfx942", "cdna", 64)


def branch(num_words: int) -> int:
    return 0xBF820000 | num_words & 0xFFFF


@pytest.mark.parametrize("entry", [0, 0x5B700])
def test_branches_name_records(entry: int) -> None:
    literal_move = (0xBE8000FF, 0x12345678)  # two words, one record
    code = code_of(branch(3), *literal_move, S_NOP, branch(-5), S_ENDPGM)
    records = translate_kernel(kernel_of(code, entry), CDNA)
    assert [record.operation for record in records] == [
        "s_branch",
        "s_mov_b32",
        "s_nop",
        "s_branch",
        "s_endpgm",
    ]
    assert [record.target for record in records if record.kind is Class.BRANCH] == [3, 0]


@pytest.mark.parametrize("num_words", [-2, 1, 100])
def test_a_branch_to_no_instruction_is_unknown(num_words: int) -> None:
    literal_move = (0xBE8000FF, 0x12345678)
    records = translate_kernel(kernel_of(code_of(branch(num_words), *literal_move, S_ENDPGM)), CDNA)
    assert records[0].operation == f"unknown:s_branch to {4 + 4 * num_words:#x}"
    assert records[0].target == -1


def test_what_cannot_be_decoded_is_an_unknown_operation() -> None:
    (record,) = translate_kernel(kernel_of(code_of(0xFFFFFFFF)), CDNA)
    assert record.operation == "unknown:invalid_ffffffff"


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_bare_code_becomes_a_program(chip: Chip) -> None:
    program = translate_code(chip, code_of(S_NOP), lds_bytes=64)
    assert program.startswith(MAGIC)
