"""Translation of instructions and kernels, against hand-checked rows and against LLVM's disassembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu.translate import translate_code
from emulated_gpu.translate.kernel import translate, translate_instruction, translate_kernel
from emulated_gpu.translate.operands import EXEC, M0, VCC, Machine
from emulated_gpu.translate.program import FIRST_TEMPORARY, MAGIC, Class, OperandKind, Record
from shortfin_apps.llm.contract.gpu_code.code_object import Descriptor, Kernel
from shortfin_apps.llm.contract.gpu_code.decode import decode
from shortfin_apps.llm.contract.gpu_code.reading import read_code_object
from tests.code_objects import CHIPS as CHIP_NAMES
from tests.code_objects import DISASSEMBLED, disassembled, tiny_code_objects
from tests.conftest import BuildTiny
from tests.emulated_gpu.translate.rendering import rendered, translated

FOLDER = Path(__file__).parent


def rows(chip: str) -> list[list[str]]:
    """Assembly, words, records."""
    lines = (FOLDER / f"records_{chip}.txt").read_text().splitlines()
    return [re.split(r" \| ", line) for line in lines if not line.startswith("#")]


ROWS = [pytest.param(chip, *row[1:], id=f"{chip} {row[0]}") for chip in CHIPS for row in rows(chip)]


@pytest.mark.parametrize(("chip", "words", "expected"), ROWS)
def test_instruction(chip: str, words: str, expected: str) -> None:
    assert rendered(translated(chip, words)) == expected


@pytest.mark.parametrize("chip", DISASSEMBLED)
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


@pytest.mark.parametrize("chip", CHIP_NAMES)
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


@pytest.mark.parametrize("chip", DISASSEMBLED)
def test_registers_and_their_counts_agree_with_llvm(build_tiny: BuildTiny, chip: str, tmp_path: Path) -> None:
    num_compared = 0
    for image in tiny_code_objects(build_tiny, chip):
        lines = disassembled(image, tmp_path)
        for kernel in read_code_object(image).kernels:
            machine = Machine(chip, CHIPS[chip].instruction_set, kernel.lanes)
            for instruction in decode(kernel.code, kernel.entry, machine.instruction_set):
                if (line := lines.get(instruction.address)) is None:
                    continue
                records = translate_instruction(instruction, machine)
                printed, ours = printed_registers(line.operands), registers_of(records)
                assert printed <= ours, (line, records)
                assert {each[1] for each in ours - printed} <= implicit_registers(records), records
                num_compared += len(ours)
    assert num_compared > 10_000
