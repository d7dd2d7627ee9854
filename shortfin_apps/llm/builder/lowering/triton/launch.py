"""Emit dispatches of Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.lowering.dispatch import dispatch, size_of
from shortfin_apps.llm.builder.lowering.lowering import RenderedKernels
from shortfin_apps.llm.builder.lowering.triton.byte_attention import byte_form
from shortfin_apps.llm.builder.lowering.triton.hopper_block_matmul import block_form
from shortfin_apps.llm.builder.lowering.triton.hopper_matmul import hopper_form
from shortfin_apps.llm.builder.target import Target

Operands = Mapping[str, Dim | Tensor | None]


class Launcher:
    """Emits dispatches of kernels for one target; `rendered` compiles them."""

    def __init__(self, target: Target, rendered: RenderedKernels) -> None:
        self._target = target
        self._rendered = rendered

    @property
    def is_hopper(self) -> bool:
        """Whether kernels may have their forms for Hopper."""
        return self._target.cpu.startswith("sm_90")

    def launch(self, e: Emitter, kernel: Kernel, operands: Operands) -> dict[str, Tensor]:
        """Emit a dispatch of `kernel`; return the buffers that the kernel writes, by name.

        Buffers that are None in `operands` are removed from the interface; the kernel's function gets None.
        """
        absent = {name for name, operand in operands.items() if operand is None}
        given = {name: operand for name, operand in operands.items() if operand is not None}
        kernel = kernel.without(absent)
        if self.is_hopper:
            tokens = given.get("tokens")
            kernel = byte_form(block_form(hopper_form(kernel, tokens), tokens), given.get("rows"))
        name = self._rendered.compile(kernel, self._target)
        workload = [size_of(given[name]) for name in kernel.workload]
        return dispatch(e, name, kernel.interface, workload, given)
