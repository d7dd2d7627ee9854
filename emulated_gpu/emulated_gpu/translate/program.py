"""Writes program files (`emulated_gpu/wave/program.h`), which hold kernels as sequences of operations."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from emulated_gpu.machine_code.code_object import Kernel

MAGIC = b"WAVEPRG1"
RECORD_BYTES = 128

_HEADER = struct.Struct("<QBBBHIIIIIIHHHHHHHII")
_ARGUMENT = struct.Struct("<HHB")
_START = struct.Struct("<IHBB")
_OPERAND = struct.Struct("<BBHQ")
_REST = struct.Struct("<8BIiii4B4BI")

FIRST_ACCUMULATION_REGISTER = 256
FIRST_TEMPORARY = 512


class OperandKind(IntEnum):
    """The kind of an operand. Values are those in program files."""

    NOTHING = 0  # reads 0, writes are dropped
    SGPR = 1
    VGPR = 2
    CONSTANT = 3
    SCC = 4
    VCCZ = 5
    EXECZ = 6
    APERTURE = 7


class Class(IntEnum):
    """The class under which the emulator counts an instruction. Values are those in program files."""

    OTHER = 0
    SCALAR = 1
    SCALAR_MEMORY = 2
    VECTOR = 3
    TRANSCENDENTAL = 4
    MATRIX = 5
    LOAD = 6
    STORE = 7
    LDS = 8
    SCRATCH = 9
    BRANCH = 10
    BARRIER = 11
    WAIT = 12
    ATOMIC = 13
    MESSAGE = 14


class Encoding(IntEnum):
    """A record's lane modifier: source 0 is from other lanes (DPP), or operands are bytes or words (SDWA)."""

    PLAIN = 0
    DPP16 = 1
    DPP8 = 2
    SDWA = 3


class MemoryFlag(IntEnum):
    """Bits of `Record.memory`."""

    OFFEN = 1
    IDXEN = 2
    TO_LDS = 4
    RETURNS = 8  # an atomic that returns the old value
    TFE = 16
    FOR_DEVICE = 32  # a load or store that no cache between compute units and device hides


@dataclass(frozen=True, slots=True)
class Operand:
    """A source or a destination. `index`: first register; `dwords`: number of registers.

    `value`: a constant, already converted to the width and format in which the operation reads it.
    """

    kind: OperandKind
    dwords: int = 1
    index: int = 0
    value: int = 0


NO_TARGET = -1
NOTHING = Operand(OperandKind.NOTHING)


@dataclass(slots=True)
class Record:
    """One operation with its operands.

    In `neg`, `abs`, `neg_hi`, `opsel` and `opsel_hi`, bit i is for source i; bit 3 of `opsel` is for `dst`.
    """

    operation: str
    kind: Class
    dst: Operand = NOTHING
    dst2: Operand = NOTHING
    sources: list[Operand] = field(default_factory=list)  # up to four
    address: int = 0
    words: int = 0
    is_counted: bool = True
    neg: int = 0
    abs: int = 0
    neg_hi: int = 0
    opsel: int = 0
    opsel_hi: int = 0
    clamp: int = 0
    omod: int = 0
    encoding: Encoding = Encoding.PLAIN
    lanes_modifier: int = 0
    offset: int = 0
    offset1: int = 0
    target: int = NO_TARGET  # of a branch: an address, which translate_kernel replaces by a record's index
    bytes: int = 0
    sign: int = 0
    d16: int = 0
    memory: int = 0
    cbsz: int = 0
    abid: int = 0
    blgp: int = 0


@dataclass(frozen=True)
class KernelProgram:
    """A kernel and the records to which it was translated. `generation` and `writes_back` are the chip's."""

    kernel: Kernel
    generation: int
    writes_back: bool
    records: list[Record]


# Numbers of hidden arguments, in the order of `enum argument_kind` in program.h.
_ARGUMENT_KINDS = {
    name: number
    for number, name in enumerate(
        (
            *("hidden_block_count_x", "hidden_block_count_y", "hidden_block_count_z"),
            *("hidden_group_size_x", "hidden_group_size_y", "hidden_group_size_z"),
            *("hidden_remainder_x", "hidden_remainder_y", "hidden_remainder_z"),
            *("hidden_global_offset_x", "hidden_global_offset_y", "hidden_global_offset_z"),
            *("hidden_grid_dims", "hidden_dynamic_lds_size"),
        ),
        start=1,
    )
}
_HIDDEN_OTHER = 15


def pack(kernels: list[KernelProgram]) -> bytes:
    """Return the content of a program file with these kernels."""
    names = sorted({record.operation for each in kernels for record in each.records})
    numbers = {name: number for number, name in enumerate(names)}
    return b"".join(
        (
            MAGIC,
            struct.pack("<I", len(names)),
            *(struct.pack("<B", len(name)) + name.encode() for name in names),
            struct.pack("<I", len(kernels)),
            *(part for each in kernels for part in _kernel(each, numbers)),
        )
    )


def _kernel(each: KernelProgram, numbers: dict[str, int]) -> Iterator[bytes]:
    kernel, descriptor = each.kernel, each.kernel.descriptor
    name = kernel.name.encode()
    yield struct.pack("<H", len(name)) + name
    yield _HEADER.pack(
        *(kernel.entry, kernel.lanes, each.generation, each.writes_back, len(kernel.arguments)),
        *(descriptor.kernarg_bytes, descriptor.lds_bytes, descriptor.scratch_bytes),
        *(descriptor.rsrc1, descriptor.rsrc2, descriptor.rsrc3, descriptor.properties, descriptor.preload),
        *(kernel.num_vgprs, kernel.num_agprs, kernel.num_sgprs),
        *(kernel.num_vgpr_spills, kernel.num_sgpr_spills, kernel.max_workgroup, len(each.records)),
    )
    for argument in kernel.arguments:
        yield _ARGUMENT.pack(argument.offset, argument.size, _argument_kind(argument.kind))
    for record in each.records:
        yield _record(record, numbers[record.operation])


def _argument_kind(kind: str) -> int:
    return _ARGUMENT_KINDS.get(kind, _HIDDEN_OTHER if kind.startswith("hidden_") else 0)


def _record(record: Record, operation: int) -> bytes:
    operands = [record.dst, record.dst2, *record.sources]
    operands += [NOTHING] * (6 - len(operands))
    return b"".join(
        (
            _START.pack(record.address, operation, record.words, int(record.is_counted)),
            *(_OPERAND.pack(each.kind, each.dwords, each.index, each.value) for each in operands),
            _REST.pack(
                *(
                    record.neg,
                    record.abs,
                    record.neg_hi,
                    record.opsel,
                    record.opsel_hi,
                    record.clamp,
                    record.omod,
                ),
                *(record.encoding, record.lanes_modifier, record.offset, record.offset1, record.target),
                *(record.bytes, record.sign, record.d16, record.memory),
                *(record.cbsz, record.abid, record.blgp, 0, record.kind),
            ),
        )
    ).ljust(RECORD_BYTES, b"\0")
