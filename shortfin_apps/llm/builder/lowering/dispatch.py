"""Emit dispatches of hand-written kernels, with operands named as in the kernel's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.interface import Interface


def dispatch(
    e: Emitter,
    kernel: str,
    interface: Interface,
    workload: Sequence[Dim],
    operands: Mapping[str, Dim | Tensor],
) -> dict[str, Tensor]:
    """Emit a dispatch of `kernel`; return the buffers that the kernel writes, by name.

    `operands` must have the interface's constants, the buffers that are read, and the ones written in place.
    Other written buffers are new results with the shape in the interface; `operands` must have their dynamic
    sizes, too.
    """

    def result(name: str) -> Tensor | tuple[list[Dim], str]:
        if name in operands:
            return _tensor(operands[name])
        made = interface.writes[name]
        return [size_of(operands[d]) if isinstance(d, str) else d for d in made.shape], made.dtype

    names = sorted(interface.writes, key=operands.__contains__)  # new results first, then in-place ones
    written = e.dispatch(
        kernel,
        workload,
        [size_of(operands[name]) for name in interface.constants],
        [_tensor(operands[name]) for name in interface.reads],
        [result(name) for name in names],
    )
    return dict(zip(names, written, strict=True))


def size_of(operand: Dim | Tensor) -> Dim:
    """Return the operand as a size. Callers must not pass a tensor."""
    assert not isinstance(operand, Tensor)
    return operand


def _tensor(operand: Dim | Tensor) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand
