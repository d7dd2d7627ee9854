"""Translates scalar instructions to records, in which branch targets are still addresses."""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Instruction, Shape
from emulated_gpu.machine_code.formats import OperandType
from emulated_gpu.translate.names import canonical_name
from emulated_gpu.translate.operands import Machine, constant, dwords_of, scalar, source
from emulated_gpu.translate.program import NOTHING, Class, Operand, Record
from emulated_gpu.translate.waits import wait

# Instructions without an effect that a program could observe: waits, hints to caches and the scheduler.
_NOTHING = (
    *(
        "s_nop",
        "s_wait",
        "s_delay_alu",
        "s_clause",
        "s_sleep",
        "s_setprio",
        "s_icache_inv",
        "s_inst_prefetch",
    ),
    *(
        "s_set_inst_prefetch_distance",
        "s_version",
        "s_wakeup",
        "s_ttracedata",
        "s_incperflevel",
        "s_decperflevel",
    ),
    *("s_set_valu_coexec_mode", "s_code_end"),
)
_MESSAGES = ("s_sendmsg", "s_sendmsghalt")
_WITH_IMMEDIATE = (
    "s_denorm_mode",
    "s_round_mode",
    "s_barrier_wait",
    "s_barrier_leave",
    "s_trap",
    "s_sethalt",
)
_READS_DESTINATION = (
    "s_bitset0_b32",
    "s_bitset0_b64",
    "s_bitset1_b32",
    "s_bitset1_b64",
    "s_cmov_b32",
    "s_cmov_b64",
)
_B32 = OperandType(32, "B32", "SSRC")


def scalar_instruction(instruction: Instruction, machine: Machine) -> Record:
    """Translate a scalar instruction other than a load."""
    shape = instruction.shape
    waiting = wait(shape, machine)
    if waiting is not None:
        return waiting
    name = canonical_name(shape.mnemonic)
    match shape.format:
        case "SOPP":
            return _program_control(name, instruction)
        case "SOPK":
            return _with_immediate(name, instruction, machine)
        case _:
            return _arithmetic(name, shape, machine)


def _arithmetic(name: str, shape: Shape, machine: Machine) -> Record:
    literal = shape.fields.get("literal", 0)
    record = Record(name, Class.SCALAR, dst=_destination(shape, machine))
    record.sources = [
        source(shape.fields[field], shape.operands[field], machine, literal)
        for field in ("ssrc0", "ssrc1")
        if field in shape.operands and field in shape.fields
    ]
    if name in _READS_DESTINATION:
        record.sources.append(record.dst)
    if name.startswith(("s_setpc_", "s_swappc_")):
        record.kind = Class.BRANCH
    elif name.startswith("s_barrier"):
        record.kind = Class.BARRIER
    _make_multiply_add_explicit(record, literal, machine)
    return record


def _make_multiply_add_explicit(record: Record, literal: int, machine: Machine) -> None:
    value = source(255, _B32, machine, literal)
    match record.operation:
        case "s_fmac_f32" | "s_fmac_f16":
            record.sources.append(record.dst)
        case "s_fmaak_f32":
            record.sources.append(value)
        case "s_fmamk_f32":
            record.sources.insert(1, value)
        case _:
            return
    record.operation = "s_fma_" + record.operation.rpartition("_")[2]


def _destination(shape: Shape, machine: Machine) -> Operand:
    if "sdst" not in shape.fields or "sdst" not in shape.operands:
        return NOTHING
    return scalar(shape.fields["sdst"], dwords_of(shape.operands["sdst"], machine), machine)


def _signed(immediate: int) -> int:
    return immediate - (immediate >> 15 << 16)


def _program_control(name: str, instruction: Instruction) -> Record:
    immediate = instruction.shape.fields["simm16"]
    if name.startswith(("s_branch", "s_cbranch")):
        return Record(name, Class.BRANCH, target=_target(instruction))
    if name in _MESSAGES:
        return Record("s_nop", Class.MESSAGE, offset=immediate)
    if name.startswith(_NOTHING):
        return Record("s_nop", Class.WAIT, offset=immediate)
    if name.startswith(_WITH_IMMEDIATE):
        kind = Class.BARRIER if name.startswith("s_barrier") else Class.OTHER
        return Record(name, kind, sources=[constant(immediate)], offset=immediate)
    return Record(name, Class.BARRIER if name == "s_barrier" else Class.OTHER, offset=immediate)


def _target(instruction: Instruction) -> int:
    """Return a branch's target address. It is encoded as an offset, in words, from the next instruction."""
    return instruction.address + 4 * instruction.shape.words + 4 * _signed(instruction.shape.fields["simm16"])


def _with_immediate(name: str, instruction: Instruction, machine: Machine) -> Record:
    shape = instruction.shape
    immediate = shape.fields["simm16"]
    register = scalar(shape.fields["sdst"], 1, machine)
    if name.startswith(_NOTHING):
        return Record("s_nop", Class.WAIT, offset=immediate)
    if name.startswith("s_cmpk_"):
        compared = constant(immediate if name.endswith("_u32") else _signed(immediate))
        return Record("s_cmp_" + name.removeprefix("s_cmpk_"), Class.SCALAR, sources=[register, compared])
    match name:
        case "s_movk_i32":
            return Record("s_mov_b32", Class.SCALAR, register, sources=[constant(_signed(immediate))])
        case "s_cmovk_i32":
            return Record(
                "s_cmov_b32", Class.SCALAR, register, sources=[constant(_signed(immediate)), register]
            )
        case "s_addk_i32":
            return Record(
                "s_add_i32", Class.SCALAR, register, sources=[register, constant(_signed(immediate))]
            )
        case "s_mulk_i32":
            return Record(
                "s_mul_i32", Class.SCALAR, register, sources=[register, constant(_signed(immediate))]
            )
        case "s_getreg_b32":
            return Record(name, Class.SCALAR, register, sources=[constant(immediate)])
        case "s_setreg_b32":
            return Record(name, Class.SCALAR, sources=[register, constant(immediate)])
        case "s_setreg_imm32_b32":
            value = constant(shape.fields["literal"])
            return Record("s_setreg_b32", Class.SCALAR, sources=[value, constant(immediate)])
        case "s_call_b64":
            return Record(
                name, Class.BRANCH, scalar(shape.fields["sdst"], 2, machine), target=_target(instruction)
            )
        case _:
            return Record(f"unknown:{shape.mnemonic}", Class.OTHER)
