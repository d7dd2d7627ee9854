"""Translates lane modifiers: DPP (source 0 is from other lanes), SDWA (operands are bytes or words)."""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.translate.operands import Machine, source
from emulated_gpu.translate.program import Encoding, Record

_DPP8_FETCHES_INACTIVE = 234


def apply_lane_modifiers(record: Record, shape: Shape, machine: Machine) -> None:
    """Set the lane modifiers of `record` from those of `shape`. SDWA can also make sources scalar."""
    if shape.modifier == "DPP16":
        _dpp16(record, shape)
    elif shape.modifier == "DPP8":
        _dpp8(record, shape)
    elif shape.modifier == "SDWA":
        _sdwa(record, shape, machine)


def _dpp16(record: Record, shape: Shape) -> None:
    fields = shape.fields
    record.encoding = Encoding.DPP16
    record.lanes_modifier = (
        fields["dpp"]
        | fields["row_mask"] << 16
        | fields["bank_mask"] << 20
        | fields["bc"] << 24
        | fields.get("fi", 0) << 25
    )
    if not shape.format.startswith("VOP3"):  # VOP3 has these bits in its own words
        _set_signs(record, shape)


def _dpp8(record: Record, shape: Shape) -> None:
    record.encoding = Encoding.DPP8
    selects = sum(shape.fields[f"lane_sel_{lane}"] << 3 * lane for lane in range(8))
    record.lanes_modifier = selects | (shape.fields["src0"] == _DPP8_FETCHES_INACTIVE) << 25


def _sdwa(record: Record, shape: Shape, machine: Machine) -> None:
    fields = shape.fields
    record.encoding = Encoding.SDWA
    record.lanes_modifier = (
        fields["src0_sel"]
        | fields["src1_sel"] << 4
        | fields.get("dst_sel", 6) << 8
        | fields.get("dst_unused", 0) << 12
        | fields["src0_sext"] << 16
        | fields["src1_sext"] << 17
    )
    _set_signs(record, shape)
    for number, (name, is_scalar) in enumerate((("vsrc0", fields["s0"]), ("vsrc1", fields["s1"]))):
        if is_scalar and number < len(record.sources):
            operand_type = shape.operands.get("src0" if number == 0 else "vsrc1")
            record.sources[number] = source(fields[name], operand_type, machine)


def _set_signs(record: Record, shape: Shape) -> None:
    fields = shape.fields
    record.neg = fields["src0_neg"] | fields["src1_neg"] << 1
    record.abs = fields["src0_abs"] | fields["src1_abs"] << 1
