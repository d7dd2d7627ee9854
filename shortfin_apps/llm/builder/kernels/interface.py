"""The interface of a kernel's dispatch: its constants, its buffers, and memory divided into regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer operand (HAL binding): a memref of `dtype`. A str in `shape` names a dynamic size."""

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
    """Operands of a dispatch: i32 constants, then buffers (read, written in place, results).

    The name of a buffer's dynamic size is the name of a constant, except in kernels that use only the
    address of the buffer.
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
        """The MLIR attribute of the HAL's pipeline layout."""
        return pipeline_layout(len(self.constants), len(self.reads), len(self.writes))


def pipeline_layout(constants: int, reads: int, writes: int) -> str:
    """Return the layout attribute for these numbers of constants, read-only and writable buffers."""
    read = "#hal.pipeline.binding<storage_buffer, ReadOnly>"
    write = "#hal.pipeline.binding<storage_buffer>"
    bindings = ", ".join([read] * reads + [write] * writes)
    return f"#hal.pipeline.layout<constants = {constants}, bindings = [{bindings}]>"


@dataclass(frozen=True, slots=True)
class Regions:
    """Contiguous regions of a block of memory, in order; `sizes` maps their names to bytes."""

    sizes: dict[str, int]

    @property
    def offsets(self) -> dict[str, int]:
        return dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())
