"""How CDNA 2 (gfx90a) differs from CDNA 3 and 4, whose tables it shares: opcodes, spellings and fields.

Source: LLVM 19's assembler for gfx90a. `test_formats.py` compares the names with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

# Operations of the tables that CDNA 2 does not have.
ABSENT = re.compile(
    r"\w*(fp8|bf8|bf16|fp6|bf6|fp4|f8f6f4|xf32|scalef32|ld_scale|imum3|_lds_|_tr_)\w*"
    r"|v_(smfmac|prng|bitop3|ashr_pk|cvt_sr|permlane\d+_swap)_\w+|flat_atomic_(add_f32|pk_add_f16)"
    r"|v_mov_b64|v_lshl_add_u64|v_cvt_pk_f16_f32|s_set_valu_coexec_mode|buffer_inv"
)
# Operations that only CDNA 2 has, by format and opcode: name, and CDNA 3's operation on the same operands.
ADDED: Mapping[str, Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        "VOP2": {
            22: ("v_mac_f32", "v_fmac_f32"),
            23: ("v_madmk_f32", "v_fmamk_f32"),
            24: ("v_madak_f32", "v_fmaak_f32"),
        },
        "VOP3": {278: ("v_mac_f32", "v_fmac_f32"), 449: ("v_mad_f32", "v_fma_f32")},
    }
)
ABSENT_FORMATS = ("VOP3PX2", "SCRATCH")  # LLVM accesses scratch through a buffer resource

# Bits of memory instructions for caches: CDNA 3's names and CDNA 2's.
FIELDS = MappingProxyType({"sc0": "glc", "sc1": "scc", "nt": "slc"})
CACHE_OPERATIONS = MappingProxyType({41: "buffer_invl2", 62: "buffer_wbinvl1", 63: "buffer_wbinvl1_vol"})

# Matrix instructions by opcode: canonical name, registers of A (as many as of B) and of D, and a suffix.
MATRIX: Mapping[int, tuple[str, int, int, str]] = MappingProxyType(
    {
        64: ("v_mfma_f32_32x32x1_2b_f32", 1, 32, ""),
        65: ("v_mfma_f32_16x16x1_4b_f32", 1, 16, ""),
        66: ("v_mfma_f32_4x4x1_16b_f32", 1, 4, ""),
        68: ("v_mfma_f32_32x32x2_f32", 1, 16, ""),
        69: ("v_mfma_f32_16x16x4_f32", 1, 4, ""),
        72: ("v_mfma_f32_32x32x4_2b_f16", 2, 32, ""),
        73: ("v_mfma_f32_16x16x4_4b_f16", 2, 16, ""),
        74: ("v_mfma_f32_4x4x4_16b_f16", 2, 4, ""),
        76: ("v_mfma_f32_32x32x8_f16", 2, 16, ""),
        77: ("v_mfma_f32_16x16x16_f16", 2, 4, ""),
        80: ("v_mfma_i32_32x32x4_2b_i8", 1, 32, ""),
        81: ("v_mfma_i32_16x16x4_4b_i8", 1, 16, ""),
        82: ("v_mfma_i32_4x4x4_16b_i8", 1, 4, ""),
        84: ("v_mfma_i32_32x32x8_i8", 1, 16, ""),
        85: ("v_mfma_i32_16x16x16_i8", 1, 4, ""),
        99: ("v_mfma_f32_32x32x4_2b_bf16", 2, 32, "_1k"),
        100: ("v_mfma_f32_16x16x4_4b_bf16", 2, 16, "_1k"),
        101: ("v_mfma_f32_4x4x4_16b_bf16", 2, 4, "_1k"),
        102: ("v_mfma_f32_32x32x8_bf16", 2, 16, "_1k"),
        103: ("v_mfma_f32_16x16x16_bf16", 2, 4, "_1k"),
        104: ("v_mfma_f32_32x32x2_2b_bf16", 1, 32, ""),
        105: ("v_mfma_f32_16x16x2_4b_bf16", 1, 16, ""),
        107: ("v_mfma_f32_4x4x2_16b_bf16", 1, 4, ""),
        108: ("v_mfma_f32_32x32x4_bf16", 1, 16, ""),
        109: ("v_mfma_f32_16x16x8_bf16", 1, 4, ""),
        110: ("v_mfma_f64_16x16x4_f64", 2, 8, ""),
        111: ("v_mfma_f64_4x4x4_4b_f64", 2, 2, ""),
    }
)


def spelled(canonical: str, suffix: str) -> str:
    """Return CDNA 2's spelling of a matrix instruction, which leaves out the number of blocks."""
    return re.sub(r"(?:_\d+b)?_([a-z]+\d+)$", r"\1", canonical) + suffix


CANONICAL_NAMES: Mapping[str, str] = MappingProxyType(
    {spelled(canonical, suffix): canonical for canonical, _, _, suffix in MATRIX.values()}
)
