"""Decodes machine code to instructions: mnemonics, lengths and fields, without semantics."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from emulated_gpu.machine_code.formats import (
    Format,
    InstructionSet,
    Layout,
    OperandType,
    Operation,
    formats_of,
    is_cdna,
)

_LITERAL = 255
_MODIFIERS = {249: "SDWA", 250: "DPP16"}
_RDNA_MODIFIERS = {233: "DPP8", 234: "DPP8", 250: "DPP16"}

_MAX_WORDS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """An instruction without its address, as determined by its words alone."""

    mnemonic: str  # in the vendor's spelling for this instruction set, without an encoding suffix
    format: str  # `VOP2`, `GLOBAL`, ...
    modifier: str  # "", `LIT`, `DPP16`, `DPP8` or `SDWA`
    words: int
    fields: Mapping[str, int]
    operands: Mapping[str, OperandType]


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction at an address of the loaded image."""

    address: int
    shape: Shape


def decode(code: bytes, address: int, instruction_set: InstructionSet) -> Iterator[Instruction]:
    """Yield the instructions of `code`, which starts at `address` of the image.

    A word that begins no known instruction is yielded as one with the mnemonic `invalid_` and its hex digits.
    """
    num_words = len(code) // 4
    words = struct.unpack(f"<{num_words}I", code[: 4 * num_words]) + (0,) * _MAX_WORDS
    index = 0
    while index < num_words:
        shape = _shape(instruction_set, words[index : index + _MAX_WORDS])
        yield Instruction(address + 4 * index, shape)
        index += shape.words


def _shape(instruction_set: InstructionSet, words: tuple[int, ...]) -> Shape:
    low = words[0] | words[1] << 32
    found = _find(instruction_set, words[0], low, low | words[2] << 64 | words[3] << 96)
    if found is None:
        return Shape(f"invalid_{words[0]:08x}", "", "", 1, {}, {})
    each, operation, layout = found
    return _filled(each, operation, layout, tuple(words[: layout.words]))


def _find(
    instruction_set: InstructionSet, first: int, two: int, four: int
) -> tuple[Format, Operation, Layout] | None:
    for each in formats_of(instruction_set)[first >> 23]:
        if four & each.mask != each.value:
            continue
        operation = each.operations.get(four >> each.op_low & each.op_mask)
        if operation is not None:
            return each, operation, _layout(each, operation, instruction_set, two)
    return None


def _layout(each: Format, operation: Operation, instruction_set: InstructionSet, two: int) -> Layout:
    """Return the variant of a format (plain, literal, DPP or SDWA) that the first two words select."""
    plain = each.layouts[""]
    sources = [two >> low & mask for low, mask in each.sources]
    if sources and each.has_lane_modifiers:
        modifiers = _MODIFIERS if is_cdna(instruction_set) else _RDNA_MODIFIERS
        modified = each.layouts.get(modifiers.get(sources[0], ""), plain)
        if modified is not plain:
            return modified
    if operation.needs_literal or _LITERAL in sources or _is_dual_with_literal(each, two):
        return each.layouts.get("LIT", plain)
    return plain


def _is_dual_with_literal(each: Format, two: int) -> bool:
    """Whether a half of a dual instruction has a literal: v_dual_fmaak_f32 (opcode 1) or fmamk_f32 (2)."""
    return each.name == "VOPD" and (two >> 22 & 15 in (1, 2) or two >> 17 & 31 in (1, 2))


def _filled(each: Format, operation: Operation, layout: Layout, words: tuple[int, ...]) -> Shape:
    raw = sum(word << 32 * index for index, word in enumerate(words))
    fields = {name: raw >> low & mask for name, low, mask in layout.fields}
    return Shape(operation.name, each.name, layout.modifier, layout.words, fields, operation.operands)
