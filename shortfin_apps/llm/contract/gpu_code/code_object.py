"""Finds AMD code objects in a VMFB; the package `emulated_gpu` reads their kernels and instructions.

Source: LLVM's "User Guide for AMDGPU Backend" (ELF header).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.gpu_code.chips import BY_NUMBER, CHIPS

if TYPE_CHECKING:
    from emulated_gpu.machine_code.code_object import CodeObject

_MACHINE = 224  # EM_AMDGPU
_OS_ABI = 64  # ELFOSABI_AMDGPU_HSA
_HEADER = struct.Struct("<4s4B8xHHIQQQIHHHHHH")


def read_code_objects(vmfb: bytes) -> list[CodeObject]:
    """Parse the code objects in a VMFB, in order; empty if there are none.

    Needs the package `emulated_gpu` unless empty. Raises ArtifactError for a damaged code object and for an
    unknown chip.
    """
    images = list(code_objects_in(vmfb))
    if not images:
        return []
    from emulated_gpu.errors import CodeObjectError
    from emulated_gpu.machine_code.code_object import read_code_object

    try:
        return [read_code_object(each) for each in images]
    except CodeObjectError as error:
        raise ArtifactError(str(error)) from error


def code_objects_in(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each code object in a VMFB, in order.

    Searches for ELF headers, because every version of IREE's executable formats stores code objects
    unmodified in a byte vector.
    """
    start = data.find(b"\x7fELF")
    while start >= 0:
        size = _code_object_size(data, start)
        if size:
            yield data[start : start + size]
        start = data.find(b"\x7fELF", start + max(size, 4))


def _code_object_size(data: bytes, start: int) -> int:
    """Return the size of the code object at `start`, whose section headers come last; 0 if there is none."""
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
    """Return the name of the chip, such as "gfx942". Raises ArtifactError for an unknown chip."""
    number = _HEADER.unpack_from(code_object)[11] & 0xFF  # e_flags: EF_AMDGPU_MACH
    if number not in BY_NUMBER:
        known = ", ".join(CHIPS)
        raise ArtifactError(f"the code object is for a chip with ELF number {number:#x}; known are {known}")
    return BY_NUMBER[number].name
