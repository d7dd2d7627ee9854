"""Reads AMD code objects: ELF files with kernels, kernel descriptors and metadata.

Source: LLVM's "User Guide for AMDGPU Backend" (ELF header, kernel descriptor, code object metadata).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from emulated_gpu.chips import BY_NUMBER, CHIPS
from emulated_gpu.errors import CodeObjectError

_METADATA_NOTE = 32  # NT_AMDGPU_METADATA
_DESCRIPTOR = struct.Struct("<III4xq20xIIIHH4x")


@dataclass(frozen=True)
class Argument:
    """A kernel's argument: offset and size in bytes; `kind` as in the metadata, for example `by_value`."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Descriptor:
    """The kernel descriptor, which the hardware reads to start a kernel. `scratch_bytes` are per lane."""

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
    """A kernel of a code object. `lanes` are per wave."""

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
    workgroup: tuple[int, int, int] | None  # the workgroup size that launches must have, None for any
    entry: int  # address of the first instruction
    code: bytes


@dataclass(frozen=True)
class Segment:
    """A segment of the loaded image: `size` bytes at `address`, which are `data` followed by zeros."""

    address: int
    size: int
    data: bytes


@dataclass(frozen=True)
class CodeObject:
    """The kernels of one executable, compiled for one chip."""

    chip: str
    segments: tuple[Segment, ...]
    kernels: tuple[Kernel, ...]


def read_code_object(data: bytes) -> CodeObject:
    """Read a code object. Raises CodeObjectError if it is damaged or for an unknown chip."""
    try:
        elf = ELFFile(io.BytesIO(data))
        segments = tuple(_segments(elf))
        kernels = tuple(_kernels(elf, segments))
    except (ELFError, KeyError, ValueError, struct.error) as error:
        raise CodeObjectError(f"the code object cannot be read: {error!r}") from error
    return CodeObject(_chip_of(elf), segments, kernels)


def _chip_of(elf: Any) -> str:
    number = elf["e_flags"] & 0xFF
    if number not in BY_NUMBER:
        known = ", ".join(CHIPS)
        raise CodeObjectError(f"the code object is for a chip with ELF number {number:#x}; known are {known}")
    return BY_NUMBER[number].name


def _segments(elf: Any) -> Iterator[Segment]:
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_LOAD":
            yield Segment(segment["p_vaddr"], segment["p_memsz"], segment.data())


def _kernels(elf: Any, segments: tuple[Segment, ...]) -> Iterator[Kernel]:
    table = elf.get_section_by_name(".dynsym")
    symbols = {symbol.name: symbol for symbol in table.iter_symbols()}
    for metadata in _metadata(elf).get("amdhsa.kernels", []):
        name = metadata[".symbol"].removesuffix(".kd")
        address = symbols[metadata[".symbol"]]["st_value"]
        descriptor = Descriptor(*_DESCRIPTOR.unpack(_bytes_at(segments, address, _DESCRIPTOR.size)))
        entry = address + descriptor.entry_offset
        code = _bytes_at(segments, entry, symbols[name]["st_size"])
        yield _kernel(name, metadata, descriptor, entry, code)


def _kernel(
    name: str, metadata: Mapping[str, Any], descriptor: Descriptor, entry: int, code: bytes
) -> Kernel:
    workgroup = metadata.get(".reqd_workgroup_size")
    return Kernel(
        name=name,
        descriptor=descriptor,
        arguments=tuple(
            Argument(argument[".offset"], argument[".size"], argument[".value_kind"])
            for argument in metadata.get(".args", [])
        ),
        lanes=metadata[".wavefront_size"],
        num_vgprs=metadata[".vgpr_count"],
        num_agprs=metadata.get(".agpr_count", 0),
        num_sgprs=metadata[".sgpr_count"],
        num_vgpr_spills=metadata.get(".vgpr_spill_count", 0),
        num_sgpr_spills=metadata.get(".sgpr_spill_count", 0),
        max_workgroup=metadata[".max_flat_workgroup_size"],
        workgroup=(workgroup[0], workgroup[1], workgroup[2]) if workgroup else None,
        entry=entry,
        code=code,
    )


def _metadata(elf: Any) -> dict[str, Any]:
    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_NOTE":
            continue
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (_METADATA_NOTE, "NT_AMDGPU_METADATA"):
                return dict(msgspec.msgpack.decode(note["n_descdata"]))
    raise ValueError("it has no metadata")


def _bytes_at(segments: tuple[Segment, ...], address: int, size: int) -> bytes:
    for segment in segments:
        start = address - segment.address
        if start >= 0 and start + size <= len(segment.data):
            return segment.data[start : start + size]
    raise ValueError(f"{size} bytes at {address:#x} lie outside its segments")
