"""Decodes operands: registers, and constants with their values.

Source: the CDNA 3 and RDNA 3 ISA manuals, "Scalar ALU Operands" and "Vector ALU operands".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache

from emulated_gpu.machine_code.formats import InstructionSet, OperandType, is_cdna
from emulated_gpu.translate.program import FIRST_ACCUMULATION_REGISTER, NOTHING, Operand, OperandKind

VCC = 106
M0 = 124  # index of M0 in records for every chip; RDNA encodes M0 as 125 and the null register as 124
EXEC = 126

_NULL = 124
_FIRST_VGPR = 256
_LITERAL = 255

_SPECIAL = {251: OperandKind.VCCZ, 252: OperandKind.EXECZ, 253: OperandKind.SCC}
_APERTURES = {235: 0, 236: 1, 237: 2, 238: 3}
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_OF_2_PI = {"F16": 0x3118, "BF16": 0x3E22, "F32": 0x3E22F983, "F64": 0x3FC45F306DC9C882}

_ELEMENT = re.compile(r"^(?:PK(\d*)_)?(?:WMMA_\w+_)?(\w+)$")


@dataclass(frozen=True)
class Machine:
    """The properties of a chip and a kernel that determine how operands are decoded. `lanes` are per wave."""

    chip: str
    instruction_set: InstructionSet
    lanes: int

    @property
    def is_cdna(self) -> bool:
        return is_cdna(self.instruction_set)

    @property
    def mask_dwords(self) -> int:
        """The number of scalar registers of a lane mask (one bit per lane)."""
        return self.lanes // 32


def dwords_of(operand_type: OperandType | None, machine: Machine) -> int:
    """Return the number of 32-bit registers of an operand; 1 if its type is unknown."""
    if operand_type is None:
        return 1
    if operand_type.format == "M64":
        return machine.mask_dwords
    return max(1, operand_type.bits // 32)


def vgpr(index: int, dwords: int = 1, is_accumulation: bool = False) -> Operand:
    """Return the operand of `dwords` vector or accumulation registers from `index` on."""
    return Operand(OperandKind.VGPR, dwords, index + FIRST_ACCUMULATION_REGISTER * is_accumulation)


def constant(value: int, dwords: int = 1) -> Operand:
    """Return the operand of a constant. Negative values become 64-bit two's complement."""
    return Operand(OperandKind.CONSTANT, dwords, 0, value & 0xFFFFFFFFFFFFFFFF)


def scalar(code: int, dwords: int, machine: Machine) -> Operand:
    """Return the operand of `dwords` scalar registers from the 7-bit `code` on; NOTHING for RDNA's null."""
    if not machine.is_cdna:
        if code == _NULL:
            return NOTHING
        code = M0 if code == _NULL + 1 else code
    return Operand(OperandKind.SGPR, dwords, code)


def lane_mask(register: int, machine: Machine) -> Operand:
    """Return the operand of a lane mask (one bit per lane) in the scalar registers from `register` on."""
    return Operand(OperandKind.SGPR, machine.mask_dwords, register)


def source(code: int, operand_type: OperandType | None, machine: Machine, literal: int = 0) -> Operand:
    """Return the operand for an 8- or 9-bit source code; `literal` is the word after the instruction."""
    dwords = dwords_of(operand_type, machine)
    if code >= _FIRST_VGPR:
        return vgpr(code - _FIRST_VGPR, dwords)
    if code < 128:
        return scalar(code, dwords, machine)
    if code in _SPECIAL:
        return Operand(_SPECIAL[code])
    if code in _APERTURES:
        return Operand(OperandKind.APERTURE, 2, 0, _APERTURES[code])
    return constant(_constant_value(code, operand_type, literal), dwords)


def _constant_value(code: int, operand_type: OperandType | None, literal: int) -> int:
    element = _element(operand_type)
    if code == _LITERAL:
        value = _literal_value(literal, element)
    elif code <= 192:
        value = code - 128
    elif code <= 208:
        value = 192 - code
    else:
        value = _float_value(code, element)
    return (value & 0xFFFFFFFF) * 0x100000001 if element.is_pair_of_words else value


@dataclass(frozen=True)
class _Element:
    """The format of an operand's elements, to which a constant is converted."""

    format: str
    bits: int
    is_packed: bool

    @property
    def is_pair_of_words(self) -> bool:
        """Whether the operand has two 32-bit elements, which both get the constant's value."""
        return self.is_packed and self.bits == 32


@cache
def _element(operand_type: OperandType | None) -> _Element:
    if operand_type is None:
        return _Element("B32", 32, False)
    match = _ELEMENT.match(operand_type.format)
    assert match
    return _Element(match[2], int(re.sub(r"\D", "", match[2]) or 32), match[1] == "2")


def _literal_value(literal: int, element: _Element) -> int:
    if element.format == "F64":
        return literal << 32
    if element.format == "I64":
        return literal - (literal >> 31 << 32)
    return literal & 0xFFFF if element.bits == 16 and not element.is_packed else literal


def _float_value(code: int, element: _Element) -> int:
    if element.format in _INVERSE_OF_2_PI:
        kind = element.format
    elif element.is_packed:  # packed integers: the constant is an f32
        kind = "F32"
    else:
        kind = {16: "F16", 64: "F64"}.get(element.bits, "F32")
    return _INVERSE_OF_2_PI[kind] if code == 248 else float_bits(_FLOATS[code], kind)


def float_bits(value: float, kind: str) -> int:
    """Return the bits of `value` in the format `kind`: F16, BF16, F32 or F64.

    Callers must pass a value that this format represents exactly.
    """
    if kind == "BF16":
        return float_bits(value, "F32") >> 16
    pack, unpack = {"F16": ("<e", "<H"), "F32": ("<f", "<I"), "F64": ("<d", "<Q")}[kind]
    return int(struct.unpack(unpack, struct.pack(pack, value))[0])
