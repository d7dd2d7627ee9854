"""The instruction formats of each instruction set, indexed by encoding.

A format defines the positions of an instruction's fields. Its variants (`LIT`: a literal follows, `DPP16`,
`DPP8`, `SDWA`) have fields in additional words. Positions are bit numbers, counted from the lowest bit of the
instruction's first word.

The tables are from tinygrad, which generates them from AMD's machine-readable ISA. This module finds the
format of a word itself, because tinygrad's own list of formats lacks several.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from tinygrad.renderer.amd.dsl import FixedBitField, Inst

from emulated_gpu.machine_code import cdna2

# tinygrad's tables of RDNA 3 include the instructions that RDNA 3.5 adds. "cdna": CDNA 3 and 4.
InstructionSet = Literal["cdna2", "cdna", "rdna3", "rdna4"]

# If a format has both SDWA variants, the last one, SDWA, is used. VOPC has only SDWA_SDST.
MODIFIERS = ("LIT", "DPP16", "DPP8", "SDWA_SDST", "SDWA")

# Source fields whose code can mean that a literal follows.
_SOURCES = ("src0", "src1", "src2", "ssrc0", "ssrc1", "srcx0", "srcy0")

# Mask and value of the first word of CDNA 4's scaled matrix instructions: the prefix v_mfma_ld_scale_b32.
_SCALE_PREFIX = (0xFFFF0000, 0xD3AC0000)


# Names in the tables, and the names that AMD's manuals and LLVM's assembler have instead.
_ASSEMBLER_NAMES = {
    "v_accvgpr_read": "v_accvgpr_read_b32",
    "v_accvgpr_write": "v_accvgpr_write_b32",
    "v_mad_mix_f32": "v_fma_mix_f32",
    "v_mad_mixlo_f16": "v_fma_mixlo_f16",
    "v_mad_mixhi_f16": "v_fma_mixhi_f16",
}


@dataclass(frozen=True)
class OperandType:
    """The type of an operand. A lane mask has the format `M64` and 64 bits, even in waves of 32 lanes."""

    bits: int  # of one lane
    format: str  # of its elements: `F32`, `U64`, `PK2_F16`, ...
    kind: str  # `VGPR`, `SRC`, `SREG`, ...


@dataclass(frozen=True)
class Operation:
    """What an opcode of a format stands for: name and operand types."""

    name: str  # without an encoding suffix
    operands: Mapping[str, OperandType]  # by field
    needs_literal: bool


@dataclass(frozen=True)
class Layout:
    """A format's variant: its length in words and, for each field, name, lowest bit and mask."""

    modifier: str
    words: int
    fields: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Format:
    """A family of instructions with the same fields. `mask` are its fixed bits, which equal `value`."""

    name: str
    mask: int
    value: int
    op_low: int
    op_mask: int
    operations: Mapping[int, Operation]
    layouts: Mapping[str, Layout]  # by modifier, "" for none
    sources: tuple[tuple[int, int], ...]  # lowest bit and mask of fields that may indicate a literal

    @property
    def has_lane_modifiers(self) -> bool:
        """Whether the code of source 0 can mean that a word with a DPP or SDWA modifier follows."""
        return self.name.startswith(("VOP1", "VOP2", "VOP3", "VOPC"))


def is_cdna(instruction_set: InstructionSet) -> bool:
    """Return whether it is one of CDNA's, which have most encodings in common."""
    return instruction_set in ("cdna2", "cdna")


@cache
def dual_operations(instruction_set: InstructionSet) -> Mapping[int, Operation]:
    """Return the operations that can be halves of dual instructions (VOPD), by opcode."""
    return next(each for each in formats_of(instruction_set)[0b110010 << 3] if each.name == "VOPD").operations


@cache
def formats_of(instruction_set: InstructionSet) -> tuple[tuple[Format, ...], ...]:
    """Return the possible formats for each value of the first word's upper 9 bits, most fixed bits first."""
    adapted = _as_cdna2 if instruction_set == "cdna2" else _with_xf32
    formats = sorted(map(adapted, _formats(instruction_set)), key=_precedence)
    return tuple(tuple(_candidates(formats, upper)) for upper in range(512))


def _with_xf32(each: Format) -> Format:
    """Move CDNA 3's xf32 matrix instructions from VOP3P to VOP3P_MFMA, and add their operands.

    tinygrad's tables list them as packed operations without operands.
    """
    match each.name:
        case "VOP3P":
            others = {code: operation for code, operation in each.operations.items() if code not in _XF32}
            return replace(each, operations=others)
        case "VOP3P_MFMA":
            return replace(each, operations={**each.operations, **_XF32})
        case _:
            return each


def _xf32(shape: str, num_sums: int) -> Operation:
    """Return an xf32 matrix instruction: a product of f32 matrices whose elements are rounded to 19 bits.

    A lane holds two elements of A, two elements of B and `num_sums` elements of C.
    """
    factors = OperandType(64, "PK2_F32", "SRC_VGPR_OR_ACCVGPR")
    sums = OperandType(32 * num_sums, f"PK{num_sums}_F32", "VGPR_OR_ACCVGPR")
    operands = {"src0": factors, "src1": factors, "src2": sums, "vdst": sums}
    return Operation(f"v_mfma_f32_{shape}_xf32", MappingProxyType(operands), needs_literal=False)


_XF32 = {62: _xf32("16x16x8", 4), 63: _xf32("32x32x4", 16)}


def _as_cdna2(each: Format) -> Format:
    operations = {
        code: operation
        for code, operation in each.operations.items()
        if each.name not in cdna2.ABSENT_FORMATS and not cdna2.ABSENT.fullmatch(operation.name)
    }
    by_name = {operation.name: operation for operation in each.operations.values()}
    added = cdna2.ADDED.get(each.name, {}).items()
    operations |= {code: replace(by_name[twin], name=name) for code, (name, twin) in added}
    if each.name == "MUBUF":
        operations |= {code: Operation(name, {}, False) for code, name in cdna2.CACHE_OPERATIONS.items()}
    elif each.name == "VOP3P_MFMA":
        operations = {code: _cdna2_matrix(*row) for code, row in cdna2.MATRIX.items()}
    layouts = {modifier: _with_cdna2_fields(layout) for modifier, layout in each.layouts.items()}
    return replace(each, operations=operations, layouts=layouts)


def _cdna2_matrix(canonical: str, factor_dwords: int, sum_dwords: int, suffix: str) -> Operation:
    _, _, sum_format, *_, factor_format = canonical.upper().split("_")
    factors = OperandType(32 * factor_dwords, factor_format, "SRC_VGPR_OR_ACCVGPR")
    sums = OperandType(32 * sum_dwords, sum_format, "VGPR_OR_ACCVGPR")
    operands = {"src0": factors, "src1": factors, "src2": sums, "vdst": sums}
    return Operation(cdna2.spelled(canonical, suffix), MappingProxyType(operands), needs_literal=False)


def _with_cdna2_fields(layout: Layout) -> Layout:
    fields = tuple((cdna2.FIELDS.get(name, name), low, mask) for name, low, mask in layout.fields)
    return replace(layout, fields=fields)


def _precedence(each: Format) -> tuple[int, bool]:
    """Return the sort key of a format: most fixed bits first; for equal numbers, `_SDST` formats first.

    The tables wrongly list v_cmpx also in a format with a vector destination, which must come second.
    """
    return -each.mask.bit_count(), not each.name.endswith("_SDST")


def _candidates(formats: list[Format], upper: int) -> Iterator[Format]:
    for each in formats:
        mask = each.mask >> 23 & 0x1FF
        if upper & mask == each.value >> 23 & mask:
            yield each


def _formats(instruction_set: InstructionSet) -> Iterator[Format]:
    folder = f"tinygrad.runtime.autogen.amd.{'cdna' if is_cdna(instruction_set) else instruction_set}"
    module = importlib.import_module(f"{folder}.ins")
    operands = importlib.import_module(f"{folder}.operands").OPERANDS
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Inst)
    }
    for name, each in classes.items():
        if each is not Inst and not name.endswith(tuple(f"_{modifier}" for modifier in MODIFIERS)):
            yield _format(name, each, classes, operands)


def _format(name: str, description: Any, classes: Mapping[str, Any], operands: Mapping[Any, Any]) -> Format:
    fixed = [field for _, field in description._fields if isinstance(field, FixedBitField)]
    mask, value = _fixed_bits(fixed)
    opcode = _opcode(description)
    return Format(
        name=name,
        mask=mask,
        value=value,
        op_low=opcode.lo if opcode else 0,
        op_mask=opcode.mask if opcode else 0,
        operations=_operations(
            _members(description),
            _members(classes.get(f"{name}_LIT")),
            _members(classes.get(f"{name}_SDST")),
            operands,
        ),
        layouts=dict(_layouts(name, classes)),
        sources=tuple((field.lo, field.mask) for key, field in description._fields if key in _SOURCES),
    )


def _fixed_bits(fields: list[Any]) -> tuple[int, int]:
    mask = sum(field.mask << field.lo for field in fields)
    value = sum(field.default << field.lo for field in fields)
    if mask & 0xFFFFFFFF == 0:  # VOP3PX2 lists only the fixed bits of its second half
        mask, value = mask | _SCALE_PREFIX[0], value | _SCALE_PREFIX[1]
    return mask, value


def _opcode(description: Any) -> Any:
    fields = dict(description._fields)
    return fields.get("op", fields.get("opx"))


def _members(description: Any) -> set[Any]:
    """Return the opcodes of a tinygrad format; the empty set for None."""
    opcode = _opcode(description) if description is not None else None
    if opcode is None:
        return set()
    return set(opcode._enum if opcode.allowed is None else opcode.allowed)


def _operations(
    plain: set[Any], with_literal: set[Any], with_scalar_destination: set[Any], operands: Mapping[Any, Any]
) -> dict[int, Operation]:
    literal_only = with_literal - plain - with_scalar_destination
    return {
        member.value: _operation(member, operands.get(member, {}), member in literal_only)
        for member in plain | literal_only
    }


def _operation(member: Enum, operands: Mapping[str, Any], needs_literal: bool) -> Operation:
    name = member.name.lower().removesuffix("_e32").removesuffix("_e64")
    name = _ASSEMBLER_NAMES.get(name, name)
    types = {
        _plain_field(field): OperandType(
            bits, each.name.removeprefix("FMT_").removeprefix("NUM_"), kind.name[4:]
        )
        for field, (each, bits, kind) in operands.items()
    }
    return Operation(name, MappingProxyType(types), needs_literal)


def _plain_field(name: str) -> str:
    """Return `src0` for `vsrc0`, the tables' name of source 0 if its DPP variant has a separate field."""
    return "src0" if name == "vsrc0" else name


def _layouts(name: str, classes: Mapping[str, Any]) -> Iterator[tuple[str, Layout]]:
    for modifier in ("", *MODIFIERS):
        description = classes.get(f"{name}_{modifier}" if modifier else name)
        if description is not None:
            fields = tuple(
                (key, field.lo, field.mask)
                for key, field in description._fields
                if not isinstance(field, FixedBitField)
            )
            plain = modifier.removesuffix("_SDST")
            yield plain, Layout(plain, description._base_size // 4, fields)
