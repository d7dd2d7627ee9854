"""Translates a kernel's instructions to records, and branch targets to indices of records."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu.machine_code.code_object import CodeObject, Descriptor, Kernel
from emulated_gpu.machine_code.decode import Instruction, decode
from emulated_gpu.translate.dual_issue import dual
from emulated_gpu.translate.memory import memory
from emulated_gpu.translate.operands import Machine
from emulated_gpu.translate.program import NO_TARGET, Class, KernelProgram, Record, pack
from emulated_gpu.translate.scalar import scalar_instruction
from emulated_gpu.translate.vector import scaled_matrix, vector

_SCALAR = ("SOP1", "SOP2", "SOPC", "SOPK", "SOPP")
_MEMORY = ("SMEM", "DS", "MUBUF", "VBUFFER", "FLAT", "GLOBAL", "SCRATCH", "VFLAT", "VGLOBAL", "VSCRATCH")
_VECTOR = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3P", "VOP3SD", "VOP3_SDST", "VOP1_SDST", "VOP3P_MFMA")


def translate_code(chip: Chip, code: bytes, *, lds_bytes: int = 0, scratch_bytes: int = 0) -> bytes:
    """Translate machine code at address 0 to a program file with one kernel, which is named `code`."""
    descriptor = Descriptor(lds_bytes, scratch_bytes, 0, 0, 0, 0, 0, 0, 0)
    kernel = Kernel("code", descriptor, (), chip.lanes, 256, 256, 104, 0, 0, 1024, None, 0, code)
    return pack([_program(kernel, chip)])


def translate(code_object: CodeObject) -> list[KernelProgram]:
    """Translate all kernels of a code object."""
    chip = CHIPS[code_object.chip]
    return [_program(kernel, chip) for kernel in code_object.kernels]


def _program(kernel: Kernel, chip: Chip) -> KernelProgram:
    records = translate_kernel(kernel, Machine(chip.name, chip.instruction_set, kernel.lanes))
    return KernelProgram(kernel, chip.generation, chip.writes_back, records)


def translate_kernel(kernel: Kernel, machine: Machine) -> list[Record]:
    """Translate a kernel to records, in which branch targets are indices of records."""
    records: list[Record] = []
    index_of: dict[int, int] = {}
    for instruction in decode(kernel.code, kernel.entry, machine.instruction_set):
        index_of[instruction.address] = len(records)
        records.extend(_addressed(instruction, machine))
    for record in records:
        if record.kind is Class.BRANCH and record.target != NO_TARGET:
            _resolve(record, index_of)
    return records


def _addressed(instruction: Instruction, machine: Machine) -> Iterator[Record]:
    words = instruction.shape.words
    for record in translate_instruction(instruction, machine):
        record.address, record.words = instruction.address, words
        words = 0  # of further records of the same instruction
        yield record


def translate_instruction(instruction: Instruction, machine: Machine) -> list[Record]:
    """Translate an instruction to records; if it is unsupported, the operation is `unknown:MNEMONIC`."""
    shape = instruction.shape
    if shape.format in _SCALAR:
        return [scalar_instruction(instruction, machine)]
    if shape.format in _MEMORY:
        return [memory(shape, machine)]
    if shape.format == "VOPD":
        return dual(shape, machine)
    if shape.format == "VOP3PX2":
        return [scaled_matrix(shape, machine)]
    if shape.format in _VECTOR:
        return [vector(shape, machine)]
    return [Record(f"unknown:{shape.mnemonic}", Class.OTHER)]


def _resolve(record: Record, index_of: dict[int, int]) -> None:
    """Convert a branch's target address to a record's index.

    A branch to an address outside of the kernel becomes an unknown operation.
    """
    if record.target in index_of:
        record.target = index_of[record.target]
    else:
        record.operation, record.target = f"unknown:{record.operation} to {record.target:#x}", NO_TARGET
