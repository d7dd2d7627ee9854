"""The interface of a kernel's dispatch: each constant and each buffer named and typed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buffer:
    """A binding: a memref of `dtype`, where a str in its shape is the name of a dynamic size."""

    dtype: str
    shape: tuple[int | str, ...]

    @property
    def type(self) -> str:
        dims = ["?" if isinstance(size, str) else str(size) for size in self.shape]
        return f"memref<{'x'.join([*dims, self.dtype])}>"

    @property
    def sizes(self) -> list[str]:
        """The names of the dynamic sizes, in order."""
        return [size for size in self.shape if isinstance(size, str)]


def buffer(dtype: str, *shape: int | str) -> Buffer:
    return Buffer(dtype, shape)


@dataclass(frozen=True, slots=True)
class Interface:
    """Operands of a dispatch: i32 constants, then bindings: those read, those written in place, and results.

    A buffer's dynamic sizes are constants; where a kernel takes its address only, they may be other numbers.
    """

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
