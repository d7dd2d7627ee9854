"""Makes AMD code objects by hand: kernels from machine code, with descriptors, symbols and metadata.

The format is LLVM's "User Guide for AMDGPU Backend". Everything lies in one segment whose addresses are its
places in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F, "gfx1100": 0x41, "gfx1201": 0x4E}
KERNARG_POINTER = 1 << 3  # ENABLE_SGPR_KERNARG_SEGMENT_PTR: s[0:1]
WAVE32 = 1 << 10
# Other values in user SGPRs, before and after the kernarg pointer: their number of SGPRs, by bit:
# private segment buffer, dispatch pointer, queue pointer, dispatch id, flat scratch, private segment size.
NUM_SGPRS = {0: 4, 1: 2, 2: 2, 4: 2, 5: 2, 6: 1}
GLOBAL_FUNCTION, GLOBAL_OBJECT = 0x12, 0x11  # st_info
ALLOCATED = 2  # SHF_ALLOC
RELATIVE64 = 13  # R_AMDGPU_RELATIVE64
_HEADER_BYTES, _SEGMENT_BYTES, _SECTION_BYTES, _SYMBOL_BYTES, _DESCRIPTOR_BYTES = 64, 56, 64, 24, 64


@dataclass(frozen=True)
class KernelSource:
    """A kernel: its instructions as words, and its arguments as (offset, size, kind in the metadata)."""

    name: str
    words: Sequence[int]
    arguments: Sequence[tuple[int, int, str]] = ()
    lds_bytes: int = 0
    scratch_bytes: int = 0
    max_workgroup: int = 1024
    asks_for: Sequence[int] = ()  # other bits of the descriptor's properties than KERNARG_POINTER

    @property
    def num_user_sgprs(self) -> int:
        return 2 + sum(NUM_SGPRS[bit] for bit in self.asks_for)

    @property
    def code(self) -> bytes:
        return struct.pack(f"<{len(self.words)}I", *self.words)

    @property
    def kernarg_bytes(self) -> int:
        return max((offset + size for offset, size, _ in self.arguments), default=0)


@dataclass
class _File:
    """The growing file; `place` returns where its bytes went."""

    data: bytearray
    sections: list[tuple[str, int, int, int, int, int, int]] = field(default_factory=list)

    def place(self, data: bytes, align: int = 8) -> int:
        self.data += b"\0" * (-len(self.data) % align)
        start = len(self.data)
        self.data += data
        return start

    def section(
        self,
        name: str,
        kind: int,
        data: bytes,
        *,
        align: int = 8,
        link: int = 0,
        info: int = 0,
        entry: int = 0,
    ) -> int:
        start = self.place(data, align)
        self.sections.append((name, kind, start, len(data), link, info, entry))
        return start


def code_object(
    chip: str,
    kernels: Sequence[KernelSource],
    *,
    variables: dict[str, bytes] | None = None,
    relocation: int = 0,
) -> bytes:
    """The ELF file. `variables`: global data by name, the first 8 bytes of which, if `relocation` is given as
    a type of relocation, become the address of the image's byte 16.
    """
    file = _File(bytearray(_HEADER_BYTES + 2 * _SEGMENT_BYTES))
    note = _metadata_note(chip, kernels)
    note_at = file.section(".note", 7, note, align=4)
    code_at = [file.place(kernel.code, 256) for kernel in kernels]
    descriptor_at = [
        file.place(_descriptor(chip, kernel, code_at[i] - _next(file, 64)), 64)
        for i, kernel in enumerate(kernels)
    ]
    symbols = [(k.name, GLOBAL_FUNCTION, at, len(k.code)) for k, at in zip(kernels, code_at, strict=True)]
    symbols += [
        (f"{k.name}.kd", GLOBAL_OBJECT, at, _DESCRIPTOR_BYTES)
        for k, at in zip(kernels, descriptor_at, strict=True)
    ]
    for name, data in (variables or {}).items():
        at = file.place(data)
        symbols.append((name, GLOBAL_OBJECT, at, len(data)))
        if relocation:
            file.section(".rela.dyn", 4, struct.pack("<QQq", at, relocation, 16), entry=24)
    names, table = _symbol_table(symbols)
    file.section(".dynstr", 3, names, align=1)
    file.section(".dynsym", 11, table, link=len(file.sections), info=1, entry=_SYMBOL_BYTES)
    return _finished(file, chip, note_at, len(note))


def _next(file: _File, align: int) -> int:
    return len(file.data) + -len(file.data) % align


def _descriptor(chip: str, kernel: KernelSource, entry_offset: int) -> bytes:
    properties = KERNARG_POINTER | (WAVE32 if chip.startswith("gfx1") else 0)
    properties |= sum(1 << bit for bit in kernel.asks_for)
    registers = (0, 0, kernel.num_user_sgprs << 1 | 1 << 7)  # rsrc3, rsrc1, rsrc2 with the workgroup's id
    head = struct.pack(
        "<III4xq20x", kernel.lds_bytes, kernel.scratch_bytes, kernel.kernarg_bytes, entry_offset
    )
    return head + struct.pack("<IIIHH4x", *registers, properties, 0)


def _metadata_note(chip: str, kernels: Sequence[KernelSource]) -> bytes:
    metadata = msgpack.packb(
        {"amdhsa.version": [1, 2], "amdhsa.kernels": [_metadata(chip, kernel) for kernel in kernels]}
    )
    assert isinstance(metadata, bytes)
    return (
        struct.pack("<III8s", 7, len(metadata), 32, b"AMDGPU\0\0") + metadata + b"\0" * (-len(metadata) % 4)
    )


def _metadata(chip: str, kernel: KernelSource) -> dict[str, object]:
    return {
        ".name": kernel.name,
        ".symbol": f"{kernel.name}.kd",
        ".args": [
            {".offset": offset, ".size": size, ".value_kind": kind} for offset, size, kind in kernel.arguments
        ],
        ".kernarg_segment_size": kernel.kernarg_bytes,
        ".group_segment_fixed_size": kernel.lds_bytes,
        ".private_segment_fixed_size": kernel.scratch_bytes,
        ".wavefront_size": 32 if chip.startswith("gfx1") else 64,
        ".vgpr_count": 16,
        ".sgpr_count": 16,
        ".max_flat_workgroup_size": kernel.max_workgroup,
    }


def _symbol_table(symbols: Sequence[tuple[str, int, int, int]]) -> tuple[bytes, bytes]:
    names, table = b"\0", bytes(_SYMBOL_BYTES)
    for name, info, at, size in symbols:
        table += struct.pack("<IBBHQQ", len(names), info, 0, 1, at, size)
        names += name.encode() + b"\0"
    return names, table


def _finished(file: _File, chip: str, note_at: int, note_bytes: int) -> bytes:
    loaded = len(file.data)
    file.sections.append((".shstrtab", 3, 0, 0, 0, 0, 0))
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in file.sections)
    names_at = file.place(names)
    headers_at = file.place(bytes(_SECTION_BYTES))
    for name, kind, start, size, link, info, entry in file.sections:
        if name == ".shstrtab":
            start, size = names_at, len(names)
        name_at = names.index(b"\0" + name.encode() + b"\0") + 1
        flags = ALLOCATED if name != ".shstrtab" else 0
        file.data += struct.pack(
            "<IIQQQQIIQQ", name_at, kind, flags, start, start, size, link, info, 8, entry
        )
    count = len(file.sections) + 1
    header = b"\x7fELF" + bytes([2, 1, 1, 64]) + bytes(8)
    header += struct.pack("<HHIQQQI", 3, 224, 1, 0, _HEADER_BYTES, headers_at, MACHINES[chip])
    header += struct.pack("<HHHHHH", _HEADER_BYTES, _SEGMENT_BYTES, 2, _SECTION_BYTES, count, count - 1)
    header += struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, loaded, loaded, 4096)  # PT_LOAD
    header += struct.pack("<IIQQQQQQ", 4, 4, note_at, note_at, 0, note_bytes, note_bytes, 4)  # PT_NOTE
    file.data[: len(header)] = header
    return bytes(file.data)
