"""Reads the kernels of a code object, which needs the extra `gpu-build`."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.gpu_code.code_object import (
    Argument,
    CodeObject,
    Descriptor,
    Kernel,
    Segment,
    chip_of,
)

_METADATA_NOTE = 32  # NT_AMDGPU_METADATA
_DESCRIPTOR = struct.Struct("<III4xq20xIIIHH4x")


def read_code_object(data: bytes) -> CodeObject:
    """Reads a code object; ArtifactError if it is damaged or for a chip that is not known here."""
    try:
        elf = ELFFile(io.BytesIO(data))
        segments = tuple(_segments(elf))
        kernels = tuple(_kernels(elf, segments))
    except (ELFError, KeyError, ValueError, struct.error) as error:
        raise ArtifactError(f"the code object cannot be read: {error!r}") from error
    return CodeObject(chip_of(data), segments, kernels)


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
