"""Records as text, for tests that state them."""

from __future__ import annotations

from dataclasses import fields

from emulated_gpu.chips import CHIPS
from emulated_gpu.machine_code.decode import decode
from emulated_gpu.translate.kernel import translate_instruction
from emulated_gpu.translate.operands import Machine
from emulated_gpu.translate.program import Class, Operand, OperandKind, Record

# Fields that are shown only if they differ from the default, as NAME=VALUE.
_DETAILS = (
    *("neg", "abs", "neg_hi", "opsel", "opsel_hi", "clamp", "omod", "encoding", "lanes_modifier"),
    *("offset", "offset1", "target", "bytes", "sign", "d16", "memory", "cbsz", "abid", "blgp"),
)
_HEXADECIMAL = ("lanes_modifier",)
_DEFAULTS = {each.name: each.default for each in fields(Record)}


def translated(chip: str, code: str) -> list[Record]:
    """The records of one instruction at address 0x1000, given as the hexadecimal bytes of its words."""
    machine = Machine(chip, CHIPS[chip].instruction_set, CHIPS[chip].lanes)
    (instruction,) = decode(bytes.fromhex(code), 0x1000, machine.instruction_set)
    return translate_instruction(instruction, machine)


def rendered(records: list[Record]) -> str:
    """`OPERATION DESTINATIONS = SOURCES DETAILS`; several records are divided by semicolons."""
    return "; ".join(_record(record) for record in records)


def _record(record: Record) -> str:
    destinations = [each for each in (record.dst, record.dst2) if each.kind is not OperandKind.NOTHING]
    left = " ".join([record.operation, *map(_operand, destinations)])
    right = [_operand(each) for each in record.sources]
    details = [_detail(record, name) for name in _DETAILS if getattr(record, name) != _DEFAULTS[name]]
    return " ".join([left, *(["=", *right] if right else []), *details])


def _detail(record: Record, name: str) -> str:
    value = int(getattr(record, name))
    return f"{name}={value:#x}" if name in _HEXADECIMAL else f"{name}={value}"


def _operand(operand: Operand) -> str:
    match operand.kind:
        case OperandKind.SGPR:
            return _registers("s", operand.index, operand.dwords)
        case OperandKind.VGPR if 256 <= operand.index < 512:
            return _registers("a", operand.index - 256, operand.dwords)
        case OperandKind.VGPR:
            return _registers("v", operand.index, operand.dwords)
        case OperandKind.CONSTANT:
            return f"{operand.value:#x}"
        case OperandKind.APERTURE:
            return f"aperture{operand.value}"
        case OperandKind.NOTHING:
            return "-"
        case _:
            return operand.kind.name.lower()


def _registers(letter: str, first: int, dwords: int) -> str:
    return f"{letter}{first}" if dwords == 1 else f"{letter}[{first}:{first + dwords - 1}]"


def class_of(chip: str, code: str) -> Class:
    """The kind that an instruction is counted as."""
    return translated(chip, code)[0].kind
