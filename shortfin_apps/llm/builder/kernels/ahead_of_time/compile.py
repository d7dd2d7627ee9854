"""Compiles Triton kernels ahead of time to code objects for AMD GPUs. Only a build needs Triton."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.llvm_ir import for_iree

_POINTERS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i64": "*i64", "i32": "*i32", "i8": "*i8"}
_ALIGNMENT = 16  # bytes, of every buffer that IREE passes; lets Triton load 16 bytes a lane

Signature = dict[str, str]
Constants = dict[tuple[int], Constexpr]
Attributes = dict[tuple[int], list[list[object]]]


@dataclass(frozen=True, slots=True)
class CodeObject:
    """Machine code of one kernel, launched in workgroups of `threads` lanes."""

    image: bytes
    threads: int


def compile_kernel(kernel: Kernel, chip: str) -> CodeObject:
    """Raises BuildError if IREE could not launch what comes of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    lanes = 32 if chip.startswith("gfx1") else 64
    operands = len(kernel.interface.buffers) + len(kernel.interface.constants)
    with _edited(lambda ir, shared: for_iree(ir, kernel.name, operands, shared)):
        compiled = triton.compile(
            ASTSource(kernel.function, *_signature(kernel)),
            target=GPUTarget("hip", chip, lanes),
            options={
                "num_warps": kernel.tuning.num_waves,
                "num_stages": kernel.tuning.num_stages,
                "enable_fp_fusion": True,
                # One kind of matrix instruction, so that tiles of all sizes add in the same order.
                "matrix_instr_nonkdim": 16,
            },
        )
    return CodeObject(compiled.asm["hsaco"], kernel.tuning.num_waves * lanes)


def _signature(kernel: Kernel) -> tuple[Signature, Constants, Attributes]:
    """Triton's types of all parameters, values of constexprs and attributes of buffers, by position."""
    names: list[str] = kernel.function.arg_names
    operands = {name: _POINTERS[buffer.dtype] for name, buffer in kernel.interface.buffers.items()}
    attributes: Attributes = {(names.index(name),): [["tt.divisibility", _ALIGNMENT]] for name in operands}
    operands |= dict.fromkeys(kernel.interface.constants, "i32")
    assert [name for name in names if name in operands] == list(operands), kernel.name
    assert set(names) == {*operands, *kernel.constexprs}, kernel.name
    constants: Constants = {(names.index(name),): value for name, value in kernel.constexprs.items()}
    return {name: operands.get(name, "constexpr") for name in names}, constants, attributes


@contextmanager
def _edited(edit: Callable[[str, int], str]) -> Iterator[None]:
    """Triton's stage that makes LLVM IR is followed by an edit.

    Triton's cache does not know of the edit, so it is neither read nor left behind.
    """
    from triton import knobs

    def inspect(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:  # asked for what it adds to the key of Triton's cache
            return "", ""
        stages: dict[str, Any] = arguments[1]
        make = stages["llir"]
        stages["llir"] = lambda source, metadata: edit(make(source, metadata), metadata["shared"])
        return None

    with tempfile.TemporaryDirectory() as folder, knobs.runtime.scope(), knobs.cache.scope():
        knobs.runtime.add_stages_inspection_hook = inspect
        knobs.cache.dir = folder
        yield
