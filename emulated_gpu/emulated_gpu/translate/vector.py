"""Translates vector instructions to records with explicit operands and canonical names.

Names of operations on CDNA 3's 8-bit floats, which have no infinity and no negative zero, end in `_fnuz`.
Names of CDNA 2's matrix operations on 16-bit floats, which flush denormals to zero, end in `_flush`.
"""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.machine_code.formats import OperandType
from emulated_gpu.translate.canonical import make_explicit
from emulated_gpu.translate.lanes import apply_lane_modifiers
from emulated_gpu.translate.names import canonical_name
from emulated_gpu.translate.operands import VCC, Machine, dwords_of, lane_mask, scalar, source, vgpr
from emulated_gpu.translate.program import Class, Operand, OperandKind, Record

_SHORT = ("VOP1", "VOP2", "VOPC", "VOP1_SDST")
_SOURCES = ("src0", "src1", "vsrc1", "src2")
_SCALAR_KINDS = ("SREG", "SDST", "EXEC")

_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_", "v_s_")
_MATRIX = ("v_mfma_", "v_smfmac_", "v_wmma_", "v_swmmac_")


def vector(shape: Shape, machine: Machine) -> Record:
    """Translate a vector instruction other than dual and scaled matrix instructions."""
    name = canonical_name(shape.mnemonic)
    if name == "v_nop":
        return Record("s_nop", Class.WAIT)
    record = Record(name, class_of(name), dst=_destination(shape, machine), sources=_sources(shape, machine))
    _set_modifiers(record, shape)
    apply_lane_modifiers(record, shape, machine)
    if not machine.is_cdna and shape.format in _SHORT:
        _select_halves(record, shape)
    make_explicit(record, shape, machine)
    if machine.chip == "gfx942" and ("fp8" in name or "bf8" in name):
        record.operation += "_fnuz"
    elif machine.instruction_set == "cdna2" and name.startswith("v_mfma_") and name.endswith("f16"):
        record.operation += "_flush"
    return record


def scaled_matrix(shape: Shape, machine: Machine) -> Record:
    """Translate a scaled matrix instruction of CDNA 4, which is encoded as a pair of instructions.

    Source 3 is the scale of A. `dst2` is the scale of B, a source although in a destination's place. `opsel`
    and `opsel_hi` select the bytes of the scales.
    """
    fields = shape.fields
    record = Record(shape.mnemonic, Class.MATRIX, dst=_destination(shape, machine))
    record.sources = _sources(shape, machine)
    record.sources.append(source(fields["scale_src0"], None, machine))
    record.dst2 = source(fields["scale_src1"], None, machine)
    record.opsel, record.opsel_hi = fields["opsel"], fields["opsel_hi"]
    record.cbsz, record.abid, record.blgp = fields["cbsz"], fields["abid"], fields["blgp"]
    return record


def class_of(name: str) -> Class:
    """Return the class under which a vector operation is counted."""
    if name.startswith(_MATRIX):
        return Class.MATRIX
    return Class.TRANSCENDENTAL if name.startswith(_TRANSCENDENTAL) else Class.VECTOR


def _destination(shape: Shape, machine: Machine) -> Operand:
    if "vdst" not in shape.fields:  # comparisons
        return lane_mask(VCC, machine)
    operand_type = shape.operands.get("vdst")
    dwords = dwords_of(operand_type, machine)
    if operand_type is not None and operand_type.kind.startswith(_SCALAR_KINDS):
        return scalar(shape.fields["vdst"] & 0x7F, dwords, machine)
    is_accumulation = bool(shape.fields.get("acc_cd")) or bool(
        operand_type and operand_type.kind == "ACCVGPR"
    )
    return vgpr(shape.fields["vdst"] & 0xFF, dwords, is_accumulation)


def _sources(shape: Shape, machine: Machine) -> list[Operand]:
    return [_source(name, number, shape, machine) for number, name in enumerate(_present(shape))]


def _present(shape: Shape) -> list[str]:
    return [name for name in _SOURCES if name in shape.operands and name in shape.fields]


def _source(name: str, number: int, shape: Shape, machine: Machine) -> Operand:
    operand_type = _source_type(name, number, shape)
    if "f8f6f4" in shape.mnemonic and number < 2:
        operand_type = _small_float_type(shape.fields["cbsz" if number == 0 else "blgp"])
    field = "vsrc0" if name == "src0" and "vsrc0" in shape.fields else name  # with a lane modifier
    code = shape.fields[field] + 256 * field.startswith("vsrc")
    if code >= 256 and _is_accumulation(number, operand_type, shape):
        return vgpr(code - 256, dwords_of(operand_type, machine), is_accumulation=True)
    return source(code, operand_type, machine, shape.fields.get("literal", 0))


def _source_type(name: str, number: int, shape: Shape) -> OperandType | None:
    if "_mix" in shape.mnemonic:  # a mixed-precision source is an f16 or an f32
        is_half = _opsel_hi(shape) >> number & 1
        return OperandType(16, "F16", "SRC") if is_half else OperandType(32, "F32", "SRC")
    return shape.operands[name]


def _small_float_type(code: int) -> OperandType:
    """Return the operand type of A or B in an f8f6f4 instruction, from its code in `cbsz` or `blgp`.

    A lane holds 32 elements of 8 bits (codes 0 and 1), 6 bits (2 and 3) or 4 bits (4).
    """
    return OperandType({0: 256, 1: 256, 2: 192, 3: 192}.get(code, 128), "B32", "SRC_VGPR_OR_ACCVGPR")


def _is_accumulation(number: int, operand_type: OperandType | None, shape: Shape) -> bool:
    if operand_type is not None and operand_type.kind == "SRC_ACCVGPR":
        return True
    return bool(shape.fields.get("acc_cd") if number == 2 else shape.fields.get("acc", 0) >> number & 1)


def _opsel_hi(shape: Shape) -> int:
    return shape.fields.get("opsel_hi", 0) | shape.fields.get("opsel_hi2", 0) << 2


def _set_modifiers(record: Record, shape: Shape) -> None:
    fields = shape.fields
    if shape.format.startswith("VOP3P_MFMA"):
        record.cbsz, record.abid, record.blgp = fields["cbsz"], fields["abid"], fields["blgp"]
        return
    record.neg, record.abs = fields.get("neg", 0), fields.get("abs", 0)
    record.neg_hi, record.opsel, record.opsel_hi = (
        fields.get("neg_hi", 0),
        fields.get("opsel", 0),
        _opsel_hi(shape),
    )
    record.clamp, record.omod = fields.get("clmp", 0), fields.get("omod", 0)
    if "_mix" in shape.mnemonic:
        record.abs, record.neg_hi = record.neg_hi, 0
    elif record.operation == "v_mov_b32":  # moves of accumulation registers use the packed format
        record.opsel_hi = 0


def _select_halves(record: Record, shape: Shape) -> None:
    """Decode 16-bit operands of RDNA's short encodings: halves of v0 to v127; bit 7 means the upper half."""
    for number, (name, operand) in enumerate(zip(_present(shape), record.sources, strict=True)):
        if _is_half(shape.operands[name], operand):
            record.sources[number] = vgpr(operand.index - 128)
            record.opsel |= 1 << number
    if "vdst" in shape.fields and _is_half(shape.operands.get("vdst"), record.dst):
        record.dst = vgpr(record.dst.index - 128)
        record.opsel |= 8


def _is_half(operand_type: OperandType | None, operand: Operand) -> bool:
    is_vgpr = operand.kind is OperandKind.VGPR and operand.index >= 128
    return is_vgpr and operand_type is not None and operand_type.bits == 16
