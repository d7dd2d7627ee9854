"""AMD code objects: ELF files with kernels, their descriptors and their metadata.

Source: LLVM's "User Guide for AMDGPU Backend" (ELF header, kernel descriptor, code object metadata).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shortfin_apps.llm.contract.errors import ArtifactError

# The byte of e_flags that identifies the processor (EF_AMDGPU_MACH).
_CHIPS = {0x4C: "gfx942", 0x4F: "gfx950", 0x41: "gfx1100", 0x4E: "gfx1201"}

_MACHINE = 224  # EM_AMDGPU
_OS_ABI = 64  # ELFOSABI_AMDGPU_HSA
_HEADER = struct.Struct("<4s4B8xHHIQQQIHHHHHH")


@dataclass(frozen=True)
class Argument:
    """A kernel's argument; sizes in bytes, `kind` as in the metadata: `by_value`, `global_buffer`."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Descriptor:
    """The kernel descriptor, which the hardware reads to start a kernel; sizes in bytes, scratch per lane."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int  # from the descriptor to the first instruction
    rsrc3: int
    rsrc1: int
    rsrc2: int
    properties: int
    preload: int


@dataclass(frozen=True)
class Kernel:
    """A kernel of a code object."""

    name: str
    descriptor: Descriptor
    arguments: tuple[Argument, ...]
    lanes: int
    num_vgprs: int
    num_agprs: int
    num_sgprs: int
    num_vgpr_spills: int
    num_sgpr_spills: int
    max_workgroup: int
    workgroup: tuple[int, int, int] | None  # the size that a launch is required to have
    entry: int  # address of the first instruction
    code: bytes


@dataclass(frozen=True)
class Segment:
    """A part of the loaded image: `data` at `address`, then zeros up to `size` bytes."""

    address: int
    size: int
    data: bytes


@dataclass(frozen=True)
class CodeObject:
    """The kernels of one executable, compiled for one chip."""

    chip: str
    segments: tuple[Segment, ...]
    kernels: tuple[Kernel, ...]


def code_objects_in(data: bytes) -> Iterator[bytes]:
    """Yields the code objects in a VMFB, in order.

    IREE's executable formats store them unmodified in a byte vector; searching for ELF headers therefore
    works with every version of these formats.
    """
    start = data.find(b"\x7fELF")
    while start >= 0:
        size = _code_object_size(data, start)
        if size:
            yield data[start : start + size]
        start = data.find(b"\x7fELF", start + max(size, 4))


def _code_object_size(data: bytes, start: int) -> int:
    """Returns the size of a code object, with section headers at its end; 0 if it is something else."""
    if len(data) - start < _HEADER.size:
        return 0
    header = _HEADER.unpack_from(data, start)
    bits, order, _, os_abi, _, machine = header[1:7]
    if (bits, order, os_abi, machine) != (2, 1, _OS_ABI, _MACHINE):
        return 0
    section_headers, entry_size, num_sections = header[10], header[15], header[16]
    size = int(section_headers + entry_size * num_sections)
    return size if start + size <= len(data) else 0


def chip_of(code_object: bytes) -> str:
    """Returns the name of the chip. Raises ArtifactError if it is unknown."""
    number = _HEADER.unpack_from(code_object)[11] & 0xFF  # e_flags
    if number not in _CHIPS:
        known = ", ".join(_CHIPS.values())
        raise ArtifactError(f"the code object is for a chip with ELF number {number:#x}; known are {known}")
    return _CHIPS[number]
