"""The interface of a kernel's dispatch: each constant and each buffer named and typed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buffer:
    """A binding: its memref type, and the constants that hold its dynamic sizes."""

    type: str
    sizes: tuple[str, ...] = ()


def buffer(dtype: str, *shape: int | str) -> Buffer:
    """A buffer of `shape`, where a str is the name of the constant that holds a dynamic size."""
    sizes = tuple(size for size in shape if isinstance(size, str))
    return Buffer(f"memref<{'x'.join('?' if size in sizes else str(size) for size in shape)}x{dtype}>", sizes)


def by_address(*names: str) -> dict[str, Buffer]:
    """Buffers of which a kernel takes the address only, so that their types' shapes do not matter."""
    return {name: Buffer("memref<1xi8>") for name in names}


@dataclass(frozen=True, slots=True)
class Interface:
    """Operands of a dispatch: i32 constants, then bindings, the read-only ones first, all in order."""

    constants: tuple[str, ...]
    reads: Mapping[str, Buffer]
    writes: Mapping[str, Buffer]

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {**self.reads, **self.writes}

    @property
    def types(self) -> dict[str, str]:
        """The memref type of each buffer."""
        return {name: buffer.type for name, buffer in self.buffers.items()}

    @property
    def layout(self) -> str:
        """The HAL's pipeline layout."""
        return pipeline_layout(len(self.constants), len(self.reads), len(self.writes))


def pipeline_layout(constants: int, reads: int, writes: int) -> str:
    """The attribute that says how many constants and bindings of either kind a kernel has."""
    read = "#hal.pipeline.binding<storage_buffer, ReadOnly>"
    write = "#hal.pipeline.binding<storage_buffer>"
    bindings = ", ".join([read] * reads + [write] * writes)
    return f"#hal.pipeline.layout<constants = {constants}, bindings = [{bindings}]>"
