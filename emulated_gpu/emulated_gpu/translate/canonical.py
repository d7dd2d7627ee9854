"""Converts records of vector instructions to canonical form: explicit operands, one name per operation."""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.machine_code.formats import OperandType
from emulated_gpu.translate.operands import EXEC, VCC, Machine, lane_mask, scalar, source
from emulated_gpu.translate.program import Encoding, Record

# Operations that accumulate into their destination, and the same operations with a third source instead.
_ACCUMULATING = {
    "v_fmac_f16": "v_fma_f16",
    "v_fmac_f32": "v_fma_f32",
    "v_fmac_f64": "v_fma_f64",
    "v_fmac_legacy_f32": "v_fma_legacy_f32",
    "v_mac_f16": "v_mad_f16",
    "v_mac_f32": "v_mad_f32",
    "v_pk_fmac_f16": "v_pk_fma_f16",
    "v_dot2c_f32_f16": "v_dot2_f32_f16",
    "v_dot2c_f32_bf16": "v_dot2_f32_bf16",
    "v_dot2c_i32_i16": "v_dot2_i32_i16",
    "v_dot4c_i32_i8": "v_dot4_i32_i8",
    "v_dot8c_i32_i4": "v_dot8_i32_i4",
}
_PACKED = ("v_pk_", "v_dot")
_WITH_LITERAL = {
    "v_fmaak_": ("v_fma_", (0, 1, 2)),
    "v_fmamk_": ("v_fma_", (0, 2, 1)),
    "v_madak_": ("v_mad_", (0, 1, 2)),
    "v_madmk_": ("v_mad_", (0, 2, 1)),
}
_CARRIES = ("v_add_co_", "v_sub_co_", "v_subrev_co_", "v_addc_co_", "v_subb_co_", "v_subbrev_co_")
# Number of explicit sources, in encodings where the last source, VCC, is implicit.
_NUM_BEFORE_VCC = {"v_cndmask": 2, "v_addc_co": 2, "v_subb_co": 2, "v_subbrev_co": 2, "v_div_fmas": 3}
_SWAPS = ("v_swap_", "v_permlane16_swap_", "v_permlane32_swap_")


def make_explicit(record: Record, shape: Shape, machine: Machine) -> None:
    """Make implicit operands explicit: VCC, EXEC, a destination that is also a source, and a literal.

    Also convert v_bitop3's truth table and reversed subtractions.
    """
    name = record.operation
    if name.startswith("v_cmpx_"):
        _make_comparison_explicit(record, shape, machine)
    elif name.startswith("v_cmp_") or "sdst" in shape.fields:
        _make_scalar_destination_explicit(record, shape, machine)
    elif name.startswith(_CARRIES):
        record.dst2 = lane_mask(VCC, machine)
    if len(record.sources) == _NUM_BEFORE_VCC.get(_family(name)):
        record.sources.append(lane_mask(VCC, machine))
    elif name.startswith(_SWAPS):
        record.dst2 = record.sources[0]
        record.sources.append(record.dst)
    elif name.startswith("v_bitop3_"):
        _set_truth_table(record)
    accumulate(record)
    place_literal(record, shape.fields.get("literal", 0), shape.operands.get("src0"), machine)
    reverse(record)


def _make_comparison_explicit(record: Record, shape: Shape, machine: Machine) -> None:
    """Make EXEC the destination of v_cmpx. On CDNA, `dst2` is the lane mask that v_cmp would write."""
    if machine.is_cdna:
        _make_scalar_destination_explicit(record, shape, machine)
        record.dst2 = record.dst
    record.dst = lane_mask(EXEC, machine)


def _make_scalar_destination_explicit(record: Record, shape: Shape, machine: Machine) -> None:
    if shape.modifier == "SDWA" and "sd" in shape.fields:
        record.dst = lane_mask(shape.fields["sdst"] if shape.fields["sd"] else VCC, machine)
    elif "sdst" in shape.fields:
        record.dst2 = scalar(shape.fields["sdst"], machine.mask_dwords, machine)


def _set_truth_table(record: Record) -> None:
    """Move the truth table of CDNA 4's v_bitop3 from the bits of omod, abs and neg to `cbsz`."""
    record.cbsz = record.omod << 6 | record.abs << 3 | record.neg
    record.omod = record.abs = record.neg = 0


def _family(name: str) -> str:
    return name.rpartition("_")[0]


def accumulate(record: Record) -> None:
    """Convert an operation that accumulates into its destination: add the destination as third source."""
    canonical = _ACCUMULATING.get(record.operation)
    if canonical is None:
        return
    record.sources.append(record.dst)
    if record.operation.startswith(_PACKED):
        record.opsel_hi = 7
    else:
        record.opsel |= (record.opsel >> 3 & 1) << 2
    record.operation = canonical


def place_literal(record: Record, literal: int, operand_type: OperandType | None, machine: Machine) -> None:
    """Convert v_fmaak, v_fmamk, v_madak and v_madmk to v_fma and v_mad, with the literal as a source.

    Other records are unchanged.
    """
    for prefix, (replacement, order) in _WITH_LITERAL.items():
        if record.operation.startswith(prefix):
            record.operation = replacement + record.operation.removeprefix(prefix)
            factors = [*record.sources, source(255, operand_type, machine, literal)]
            record.sources = [factors[number] for number in order]
            record.opsel = _reordered(record.opsel, order)


def _reordered(bits: int, order: tuple[int, ...]) -> int:
    """Reorder the lowest bits, one per source: new bit i is old bit `order[i]`. Higher bits stay."""
    moved = sum((bits >> old & 1) << new for new, old in enumerate(order))
    return bits >> len(order) << len(order) | moved


def reverse(record: Record) -> None:
    """Convert a reversed subtraction to a subtraction with swapped sources.

    Records with lane modifiers are unchanged, as these apply to source 0.
    """
    prefix = next((each for each in ("v_subrev_", "v_subbrev_") if record.operation.startswith(each)), None)
    if prefix is None or record.encoding is not Encoding.PLAIN:
        return
    record.operation = prefix.replace("rev", "") + record.operation.removeprefix(prefix)
    record.sources[:2] = reversed(record.sources[:2])
    record.neg, record.abs, record.opsel = (
        _reordered(bits, (1, 0)) for bits in (record.neg, record.abs, record.opsel)
    )
