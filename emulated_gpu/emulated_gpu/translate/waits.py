"""Translates waits for memory: how many accesses of each kind may remain outstanding (-1: any number).

Fields of s_waitcnt: the CDNA 3 and RDNA 3 ISA manuals, "SOPP instructions". RDNA 4 has one instruction per
counter.
"""

from __future__ import annotations

from emulated_gpu.machine_code.decode import Shape
from emulated_gpu.translate.operands import Machine, constant
from emulated_gpu.translate.program import Class, Record

_ANY = -1


def wait(shape: Shape, machine: Machine) -> Record | None:
    """Translate a wait for loads, LDS accesses, scalar loads or RDNA's stores; None for other ones."""
    immediate = shape.fields.get("simm16", 0)
    stores = _stores(shape.mnemonic, immediate)
    counts = _counts(shape.mnemonic, immediate, machine)
    if counts is None and stores is None:
        return None
    loads, lds, scalar = counts or (_ANY, _ANY, _ANY)
    sources = [] if stores is None else [constant(stores)]
    return Record("s_waitcnt", Class.WAIT, sources=sources, offset=loads, offset1=lds, target=scalar)


def _stores(mnemonic: str, immediate: int) -> int | None:
    match mnemonic:
        case "s_waitcnt_vscnt" | "s_wait_storecnt":
            return immediate & 63
        case "s_wait_storecnt_dscnt":
            return immediate >> 8 & 63
        case "s_wait_idle":
            return 0
        case _:
            return None


def _counts(mnemonic: str, immediate: int, machine: Machine) -> tuple[int, int, int] | None:
    match mnemonic:
        case "s_waitcnt" if machine.is_cdna:
            loads = immediate & 15 | immediate >> 14 << 4
            return _limit(loads, 63), _limit(immediate >> 8 & 15, 15), _ANY
        case "s_waitcnt":
            return _limit(immediate >> 10, 63), _limit(immediate >> 4 & 63, 63), _ANY
        case "s_waitcnt_vmcnt" | "s_wait_loadcnt":
            return immediate & 63, _ANY, _ANY
        case "s_waitcnt_lgkmcnt" | "s_wait_dscnt" | "s_wait_storecnt_dscnt":
            return _ANY, immediate & 63, _ANY
        case "s_wait_loadcnt_dscnt":
            return immediate >> 8 & 63, immediate & 63, _ANY
        case "s_wait_kmcnt":
            return _ANY, _ANY, immediate & 31
        case "s_wait_idle":
            return 0, 0, 0
        case _:
            return None


def _limit(count: int, largest: int) -> int:
    """Convert a field of s_waitcnt to a limit. The field's maximum value means no wait (-1)."""
    return _ANY if count == largest else count
