"""Names of memory instructions: all that chips have are either understood or listed here as not."""

from __future__ import annotations

import re

import pytest

from emulated_gpu.machine_code.formats import InstructionSet, formats_of
from emulated_gpu.translate.accesses import access_of, atomic_of, lds_access_of, lds_atomic_of

MEMORY = ("MUBUF", "VBUFFER", "FLAT", "GLOBAL", "SCRATCH", "VFLAT", "VGLOBAL", "VSCRATCH", "DS", "SMEM")
# Typed buffers, transposing and block loads, ordered and global (GWS) operations, exchanges of lanes, caches,
# clocks, scalar stores and atomics, which these chips lack, and what only ray tracing uses.
NOT_ACCESSES = re.compile(
    r".*_(format|addtid|tr|block|gws|ordered_count|bvh|gs_reg)_?.*|ds_(nop|swizzle|permute|bpermute|append|consume|wrap)\w*"
    r"|ds_(wrxchg2|storexchg_2addr|condxchg32)\w*|s_(atomic|buffer_atomic|scratch)_\w+"
    r"|(buffer|global)_(inv|invl2|wb|wbl2|wbinv|wbinvl1|wbinvl1_vol|gl0_inv|gl1_inv)|s_(atc|dcache|gl1|mem|prefetch|buffer_prefetch)\w+"
)


@pytest.mark.parametrize("instruction_set", ["cdna2", "cdna", "rdna3", "rdna4"])
def test_every_memory_instruction_is_understood_or_known_not_to_be(instruction_set: InstructionSet) -> None:
    names = {
        operation.name
        for candidates in formats_of(instruction_set)
        for each in candidates
        if each.name in MEMORY
        for operation in each.operations.values()
    }
    for name in names:
        readers = (access_of, atomic_of, lds_access_of, lds_atomic_of)
        num_understood = sum(read(name) is not None for read in readers)
        assert num_understood == (not NOT_ACCESSES.fullmatch(name)), name


@pytest.mark.parametrize(
    ("mnemonic", "operation", "size", "sign", "d16"),
    [
        ("global_load_ubyte", "global_load", 1, 0, 0),
        ("global_load_i8", "global_load", 1, 1, 0),
        ("global_load_sshort", "global_load", 2, 1, 0),
        ("buffer_load_dwordx3", "buffer_load", 12, 0, 0),
        ("flat_load_b128", "flat_load", 16, 0, 0),
        ("scratch_load_short_d16_hi", "scratch_load", 2, 0, 2),
        ("scratch_load_d16_i8", "scratch_load", 1, 1, 1),
        ("buffer_store_d16_hi_b8", "buffer_store", 1, 0, 2),
        ("global_store_short", "global_store", 2, 0, 0),
        ("global_load_lds_dwordx4", "global_load_lds", 16, 0, 0),
        ("s_load_b512", "s_load", 64, 0, 0),
        ("s_buffer_load_dwordx8", "s_buffer_load", 32, 0, 0),
    ],
)
def test_accesses(mnemonic: str, operation: str, size: int, sign: int, d16: int) -> None:
    access = access_of(mnemonic)
    assert access is not None
    assert (access.operation, access.bytes, access.sign, access.d16) == (operation, size, sign, d16)
    assert access.is_load == ("load" in mnemonic)


@pytest.mark.parametrize(
    ("mnemonic", "operation", "size", "step"),
    [
        ("ds_read_b64", "ds_load", 8, 0),
        ("ds_store_b96", "ds_store", 12, 0),
        ("ds_read2_b32", "ds_load2", 4, 4),
        ("ds_load_2addr_b64", "ds_load2", 8, 8),
        ("ds_write2st64_b64", "ds_store2", 8, 512),
        ("ds_store_2addr_stride64_b32", "ds_store2", 4, 256),
    ],
)
def test_lds_accesses(mnemonic: str, operation: str, size: int, step: int) -> None:
    access = lds_access_of(mnemonic)
    assert access is not None
    assert (access.operation, access.bytes, access.step) == (operation, size, step)


@pytest.mark.parametrize(
    ("mnemonic", "operation", "size"),
    [
        ("global_atomic_add", "global_atomic_add_u32", 4),
        ("global_atomic_add_u32", "global_atomic_add_u32", 4),
        ("flat_atomic_smax_x2", "flat_atomic_max_i64", 8),
        ("buffer_atomic_cmpswap_x2", "buffer_atomic_cmpswap_b64", 8),
        ("global_atomic_add_f64", "global_atomic_add_f64", 8),
        ("global_atomic_pk_add_f16", "global_atomic_pk_add_f16", 4),
        ("buffer_atomic_max_num_f32", "buffer_atomic_max_f32", 4),
    ],
)
def test_atomics(mnemonic: str, operation: str, size: int) -> None:
    atomic = atomic_of(mnemonic)
    assert atomic is not None
    assert (atomic.operation, atomic.bytes) == (operation, size)


@pytest.mark.parametrize(
    ("mnemonic", "operation", "returns"),
    [
        ("ds_add_u32", "ds_add_u32", False),
        ("ds_add_rtn_u64", "ds_add_u64", True),
        ("ds_cmpstore_rtn_b32", "ds_cmpswap_b32", True),
        ("ds_cmpst_f64", "ds_cmpswap_f64", False),
        ("ds_wrxchg_rtn_b32", "ds_swap_b32", True),
        ("ds_pk_add_rtn_bf16", "ds_pk_add_bf16", True),
        ("ds_min_num_rtn_f32", "ds_min_f32", True),
    ],
)
def test_lds_atomics(mnemonic: str, operation: str, returns: bool) -> None:
    atomic = lds_atomic_of(mnemonic)
    assert atomic is not None
    assert (atomic.operation, atomic.returns) == (operation, returns)
