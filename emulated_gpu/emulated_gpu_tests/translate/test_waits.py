"""Waits: every count of every counter, in the encodings of each instruction set."""

from __future__ import annotations

import pytest

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.translate.operands import Machine
from emulated_gpu.translate.waits import wait

CDNA = Machine("gfx942", "cdna", 64)
RDNA3 = Machine("gfx1100", "rdna3", 32)
RDNA4 = Machine("gfx1201", "rdna4", 32)
ANY = -1


def counts(mnemonic: str, immediate: int, machine: Machine) -> tuple[int, int, int] | None:
    record = wait(Shape(mnemonic, "SOPP", "", 1, {"simm16": immediate}, {}), machine)
    return None if record is None else (record.offset, record.offset1, record.target)


def stores(mnemonic: str, immediate: int, machine: Machine) -> int | None:
    record = wait(Shape(mnemonic, "SOPP", "", 1, {"simm16": immediate}, {}), machine)
    assert record is not None
    return record.sources[0].value if record.sources else None


def test_cdna_splits_the_count_of_loads() -> None:
    for loads in range(64):
        for lds in range(16):
            immediate = loads & 15 | loads >> 4 << 14 | lds << 8 | 7 << 4
            expected = (loads if loads < 63 else ANY, lds if lds < 15 else ANY, ANY)
            assert counts("s_waitcnt", immediate, CDNA) == expected


def test_rdna3_has_six_bits_for_each() -> None:
    for loads in range(64):
        for lds in range(64):
            immediate = loads << 10 | lds << 4 | 7
            expected = (loads if loads < 63 else ANY, lds if lds < 63 else ANY, ANY)
            assert counts("s_waitcnt", immediate, RDNA3) == expected


@pytest.mark.parametrize(
    ("mnemonic", "immediate", "expected"),
    [
        ("s_wait_loadcnt", 5, (5, ANY, ANY)),
        ("s_wait_dscnt", 6, (ANY, 6, ANY)),
        ("s_wait_kmcnt", 7, (ANY, ANY, 7)),
        ("s_wait_loadcnt_dscnt", 5 << 8 | 6, (5, 6, ANY)),
        ("s_wait_storecnt_dscnt", 5 << 8 | 6, (ANY, 6, ANY)),
        ("s_wait_idle", 0, (0, 0, 0)),
        ("s_wait_storecnt", 5, (ANY, ANY, ANY)),
        ("s_wait_alu", 0, None),
        ("s_nop", 0, None),
    ],
)
def test_rdna4_has_an_instruction_for_each(
    mnemonic: str, immediate: int, expected: tuple[int, int, int] | None
) -> None:
    assert counts(mnemonic, immediate, RDNA4) == expected


@pytest.mark.parametrize(
    ("mnemonic", "immediate", "machine", "expected"),
    [
        ("s_waitcnt_vscnt", 3, RDNA3, 3),
        ("s_wait_storecnt", 5, RDNA4, 5),
        ("s_wait_storecnt_dscnt", 5 << 8 | 6, RDNA4, 5),
        ("s_wait_idle", 0, RDNA4, 0),
        ("s_wait_loadcnt", 5, RDNA4, None),
        ("s_waitcnt", 0, RDNA3, None),
        ("s_waitcnt", 0, CDNA, None),
    ],
)
def test_rdna_counts_stores_separately(
    mnemonic: str, immediate: int, machine: Machine, expected: int | None
) -> None:
    assert stores(mnemonic, immediate, machine) == expected
