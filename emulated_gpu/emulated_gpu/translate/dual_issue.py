"""Translates RDNA's dual instructions (VOPD): two operations that read all sources before either writes."""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.machine_code.formats import OperandType, dual_operations
from emulated_gpu.translate.canonical import accumulate, place_literal, reverse
from emulated_gpu.translate.names import canonical_name
from emulated_gpu.translate.operands import VCC, Machine, lane_mask, source, vgpr
from emulated_gpu.translate.program import FIRST_TEMPORARY, Class, Operand, OperandKind, Record

_F32 = OperandType(32, "F32", "SRC")


def dual(shape: Shape, machine: Machine) -> list[Record]:
    """Return the records of a dual instruction, such that executing them in order gives the same result."""
    first, second = _half("x", shape, machine), _half("y", shape, machine)
    if not _reads(second, first.dst):
        records = [first, second]
    elif not _reads(first, second.dst):
        records = [second, first]
    else:  # each half reads the register that the other half writes
        kept = vgpr(FIRST_TEMPORARY)
        move = Record("v_mov_b32", Class.VECTOR, dst=first.dst, sources=[kept])
        first.dst = kept
        records = [first, second, move]
    for record in records[1:]:
        record.is_counted = False
    return records


def _half(letter: str, shape: Shape, machine: Machine) -> Record:
    fields = shape.fields
    operation = dual_operations(machine.instruction_set)[fields[f"op{letter}"]]
    literal = fields.get("literal", 0)
    record = Record(canonical_name(operation.name), Class.VECTOR, dst=vgpr(_destination(letter, shape)))
    # The tables have the operands of the second half (y), which apply to both.
    record.sources = [source(fields[f"src{letter}0"], operation.operands["srcy0"], machine, literal)]
    if "vsrcy1" in operation.operands:
        record.sources.append(vgpr(fields[f"vsrc{letter}1"]))
    if record.operation == "v_cndmask_b32":
        record.sources.append(lane_mask(VCC, machine))
    accumulate(record)
    place_literal(record, literal, _F32, machine)
    reverse(record)
    return record


def _destination(letter: str, shape: Shape) -> int:
    """Return a half's destination register. Half y's lowest bit is not encoded: the inverse of half x's."""
    if letter == "x":
        return shape.fields["vdstx"]
    return shape.fields["vdsty"] << 1 | (~shape.fields["vdstx"] & 1)


def _reads(record: Record, register: Operand) -> bool:
    return any(each.kind is OperandKind.VGPR and each.index == register.index for each in record.sources)
