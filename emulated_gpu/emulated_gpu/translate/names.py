"""Canonical names of operations: where instruction sets have different names, the name of CDNA 3."""

from __future__ import annotations

import re
from functools import cache

from emulated_gpu.machine_code.cdna2 import CANONICAL_NAMES

# Canonical names by mnemonic, after _RULES have been applied (which, for example, remove `_num`).
_RENAMED = {
    **CANONICAL_NAMES,
    "v_accvgpr_read_b32": "v_mov_b32",
    "v_accvgpr_write_b32": "v_mov_b32",
    "v_accvgpr_mov_b32": "v_mov_b32",
    "v_add_co_ci_u32": "v_addc_co_u32",
    "v_sub_co_ci_u32": "v_subb_co_u32",
    "v_subrev_co_ci_u32": "v_subbrev_co_u32",
    "v_cvt_pk_rtz_f16_f32": "v_cvt_pkrtz_f16_f32",
    "v_cvt_pk_norm_i16_f32": "v_cvt_pknorm_i16_f32",
    "v_cvt_pk_norm_u16_f32": "v_cvt_pknorm_u16_f32",
    "v_cvt_pk_norm_i16_f16": "v_cvt_pknorm_i16_f16",
    "v_cvt_pk_norm_u16_f16": "v_cvt_pknorm_u16_f16",
    "v_cvt_nearest_i32_f32": "v_cvt_rpi_i32_f32",
    "v_cvt_floor_i32_f32": "v_cvt_flr_i32_f32",
    "v_ctz_i32_b32": "v_ffbl_b32",
    "v_clz_i32_u32": "v_ffbh_u32",
    "v_cls_i32": "v_ffbh_i32",
    "v_mul_dx9_zero_f32": "v_mul_legacy_f32",
    "v_fma_dx9_zero_f32": "v_fma_legacy_f32",
    "v_fmac_dx9_zero_f32": "v_fmac_legacy_f32",
    "v_mad_co_u64_u32": "v_mad_u64_u32",
    "v_mad_co_i64_i32": "v_mad_i64_i32",
    "s_ctz_i32_b32": "s_ff1_i32_b32",
    "s_ctz_i32_b64": "s_ff1_i32_b64",
    "s_clz_i32_u32": "s_flbit_i32_b32",
    "s_clz_i32_u64": "s_flbit_i32_b64",
    "s_cls_i32": "s_flbit_i32",
    "s_cls_i32_i64": "s_flbit_i32_i64",
    "s_add_co_u32": "s_add_u32",
    "s_sub_co_u32": "s_sub_u32",
    "s_add_co_ci_u32": "s_addc_u32",
    "s_sub_co_ci_u32": "s_subb_u32",
    "s_add_co_i32": "s_add_i32",
    "s_sub_co_i32": "s_sub_i32",
    "s_addk_co_i32": "s_addk_i32",
    "s_endpgm_saved": "s_endpgm",
    "v_dot2acc_f32_f16": "v_dot2c_f32_f16",
    "v_dot2acc_f32_bf16": "v_dot2c_f32_bf16",
}

_RULES = (
    (re.compile(r"^v_dual_"), "v_"),
    (re.compile(r"^(v_\w*?(?:add|sub|subrev)_)nc_([ui](?:16|32))$"), r"\1\2"),
    (re.compile(r"^([vs]_\w*(?:max|min|max3|min3|med3|maxmin|minmax))_num_"), r"\1_"),
    (re.compile(r"^s_(and|or)_not1_"), r"s_\1n2_"),
    (re.compile(r"^s_(and|or)_not0_"), r"s_\1n1_"),
)


@cache
def canonical_name(mnemonic: str) -> str:
    """Return the canonical name of a scalar or vector operation. Memory operations are named in memory.py."""
    for pattern, replacement in _RULES:
        mnemonic = pattern.sub(replacement, mnemonic)
    return _RENAMED.get(mnemonic, mnemonic)
