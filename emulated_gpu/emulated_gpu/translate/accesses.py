"""Parses mnemonics of memory instructions: address space, bytes per lane, and half of the register."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Bytes per lane and whether the value is sign-extended, by the type in the mnemonic (CDNA's, then RDNA's).
_TYPES = {
    "ubyte": (1, 0),
    "sbyte": (1, 1),
    "byte": (1, 0),
    "ushort": (2, 0),
    "sshort": (2, 1),
    "short": (2, 0),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
    "dwordx8": (32, 0),
    "dwordx16": (64, 0),
    "u8": (1, 0),
    "i8": (1, 1),
    "b8": (1, 0),
    "u16": (2, 0),
    "i16": (2, 1),
    "b16": (2, 0),
    "b32": (4, 0),
    "b64": (8, 0),
    "b96": (12, 0),
    "b128": (16, 0),
    "b256": (32, 0),
    "b512": (64, 0),
}
_ACCESS = re.compile(
    r"(buffer|global|flat|scratch|s|s_buffer)_(load|store)_(lds_)?(d16_hi_|d16_)?(\w+?)(_d16_hi|_d16)?"
)
_LDS_ACCESS = re.compile(
    r"ds_(read|load|write|store)_?(2addr_stride64|2addr|2st64|2)?_([a-z]\d+)(_d16_hi|_d16)?"
)
_ATOMIC = re.compile(r"(buffer|global|flat)_atomic_(\w+)")
_LDS_ATOMIC = re.compile(
    r"ds_(add|sub|rsub|inc|dec|min|max|and|or|xor|mskor|cmpst|cmpstore|wrxchg|storexchg|pk_add|cond_sub|sub_clamp)"
    r"(?:_num)?(_rtn)?_([a-z]+\d+)"
)
_CDNA_ATOMICS = {
    "add": "add_u",
    "sub": "sub_u",
    "inc": "inc_u",
    "dec": "dec_u",
    "smin": "min_i",
    "umin": "min_u",
    "smax": "max_i",
    "umax": "max_u",
    "and": "and_b",
    "or": "or_b",
    "xor": "xor_b",
    "swap": "swap_b",
    "cmpswap": "cmpswap_b",
}
_LDS_RENAMED = {"cmpst": "cmpswap", "cmpstore": "cmpswap", "wrxchg": "swap", "storexchg": "swap"}


@dataclass(frozen=True)
class Access:
    """A load or a store of `bytes` bytes per lane.

    `d16`: 1 if the value is in the lower half of a register, 2 for the upper half, 0 for whole registers.
    """

    operation: str
    bytes: int
    sign: int = 0
    d16: int = 0
    step: int = 0  # bytes per unit of the two offsets of an access at two addresses

    @property
    def is_load(self) -> bool:
        return "_load" in self.operation

    @property
    def dwords(self) -> int:
        return (self.bytes + 3) // 4


@dataclass(frozen=True)
class Atomic:
    """An atomic operation on `bytes` bytes per lane."""

    operation: str
    bytes: int
    returns: bool = False  # the mnemonic says that it returns the old value; other formats have a bit for it


def access_of(mnemonic: str) -> Access | None:
    """Parse a load or store of memory, scratch or a buffer, or a scalar load; None for other mnemonics."""
    match = _ACCESS.fullmatch(mnemonic)
    if match is None or match[5] not in _TYPES:
        return None
    space, action, to_lds, before, kind, after = match.groups()
    size, sign = _TYPES[kind]
    return Access(f"{space}_{action}{'_lds' if to_lds else ''}", size, sign, _half(before or after))


def lds_access_of(mnemonic: str) -> Access | None:
    """Parse a load or store of LDS; None for other mnemonics."""
    match = _LDS_ACCESS.fullmatch(mnemonic)
    if match is None or match[3] not in _TYPES:
        return None
    action, pair, kind, half = match.groups()
    size, sign = _TYPES[kind]
    name = "ds_load" if action in ("read", "load") else "ds_store"
    if pair is None:
        return Access(name, size, sign, _half(half))
    return Access(f"{name}2", size, step=size * (64 if pair.endswith("64") else 1))


def atomic_of(mnemonic: str) -> Atomic | None:
    """Parse an atomic operation on global memory or a buffer; None for other mnemonics."""
    match = _ATOMIC.fullmatch(mnemonic)
    if match is None:
        return None
    space, name = match.groups()
    plain, bits = (name.removesuffix("_x2"), 64) if name.endswith("_x2") else (name, 32)
    if plain in _CDNA_ATOMICS:
        name = f"{_CDNA_ATOMICS[plain]}{bits}"
    name = name.replace("_num_", "_")
    return Atomic(f"{space}_atomic_{name}", 8 if name.endswith("64") else 4)


def lds_atomic_of(mnemonic: str) -> Atomic | None:
    """Parse an atomic operation on LDS; None for other mnemonics."""
    match = _LDS_ATOMIC.fullmatch(mnemonic)
    if match is None:
        return None
    name, returns, kind = match.groups()
    return Atomic(
        f"ds_{_LDS_RENAMED.get(name, name)}_{kind}", 8 if kind.endswith("64") else 4, returns is not None
    )


def _half(d16: str | None) -> int:
    if d16 is None:
        return 0
    return 2 if "hi" in d16 else 1
