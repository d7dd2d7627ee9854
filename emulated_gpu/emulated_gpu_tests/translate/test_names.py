"""Canonical names: one for each meaning."""

from __future__ import annotations

from collections import defaultdict

import pytest

from emulated_gpu.machine_code.formats import InstructionSet, formats_of
from emulated_gpu.translate.names import canonical_name

SCALAR_AND_VECTOR = ("SOP", "VOP")


def mnemonics(instruction_set: InstructionSet) -> set[str]:
    return {
        operation.name
        for candidates in formats_of(instruction_set)
        for each in candidates
        if each.name.startswith(SCALAR_AND_VECTOR)
        for operation in each.operations.values()
    }


@pytest.mark.parametrize(
    ("mnemonic", "expected"),
    [
        ("v_add_nc_u32", "v_add_u32"),
        ("v_dual_add_nc_u32", "v_add_u32"),
        ("v_subrev_nc_u32", "v_subrev_u32"),
        ("v_pk_add_u16", "v_pk_add_u16"),
        ("v_add_co_ci_u32", "v_addc_co_u32"),
        ("v_max_num_f32", "v_max_f32"),
        ("v_pk_min_num_f16", "v_pk_min_f16"),
        ("v_maximum_f32", "v_maximum_f32"),
        ("v_med3_num_f16", "v_med3_f16"),
        ("s_and_not1_saveexec_b32", "s_andn2_saveexec_b32"),
        ("s_or_not0_saveexec_b64", "s_orn1_saveexec_b64"),
        ("s_ctz_i32_b32", "s_ff1_i32_b32"),
        ("s_add_nc_u64", "s_add_nc_u64"),
        ("v_mfma_f32_32x32x8bf16_1k", "v_mfma_f32_32x32x8_bf16"),
        ("v_mfma_f32_32x32x4bf16", "v_mfma_f32_32x32x4_bf16"),
        ("v_mfma_i32_4x4x4i8", "v_mfma_i32_4x4x4_16b_i8"),
    ],
)
def test_spellings(mnemonic: str, expected: str) -> None:
    assert canonical_name(mnemonic) == expected


@pytest.mark.parametrize("instruction_set", ["cdna2", "cdna", "rdna3", "rdna4"])
def test_a_canonical_name_is_its_own(instruction_set: InstructionSet) -> None:
    for mnemonic in mnemonics(instruction_set):
        name = canonical_name(mnemonic)
        assert canonical_name(name) == name


@pytest.mark.parametrize("instruction_set", ["cdna2", "cdna", "rdna3", "rdna4"])
def test_different_instructions_of_a_chip_keep_different_names(instruction_set: InstructionSet) -> None:
    spellings = defaultdict(set)
    for mnemonic in mnemonics(instruction_set):
        spellings[canonical_name(mnemonic)].add(mnemonic.replace("v_dual_", "v_"))
    several = {name: found for name, found in spellings.items() if len(found) > 1}
    moves = {
        name for name in several if name in ("v_mov_b32", "s_endpgm", "v_dot2c_f32_f16", "v_dot2c_f32_bf16")
    }
    assert set(several) == moves
