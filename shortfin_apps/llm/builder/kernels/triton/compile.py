"""Compiles a Triton kernel ahead of time to a code object for an AMD GPU.

Only a build needs Triton. A kernel's parameters are, in this order: the buffers of its interface (those read,
then those written), the interface's constants, and constexprs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.builder.kernels.interface import Interface
from shortfin_apps.llm.builder.kernels.triton.llvm_ir import for_iree

_TYPES = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i64": "*i64", "i32": "*i32", "i8": "*i8"}
_ALIGNMENT = 16  # bytes, of every buffer that IREE passes; lets Triton load 16 bytes a lane


@dataclass(frozen=True, slots=True)
class CodeObject:
    """Machine code of one kernel, launched in workgroups of `threads` lanes."""

    name: str
    image: bytes
    threads: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a kernel is spread over a workgroup: waves, and tiles of loads that are in flight at once."""

    num_waves: int = 4
    num_stages: int = 2


def compile_kernel(
    function: Any,
    name: str,
    interface: Interface,
    constexprs: Mapping[str, int | bool],
    chip: str,
    tuning: Tuning,
) -> CodeObject:
    """Compiles a `triton.jit` function. Raises BuildError if IREE could not launch what comes of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    lanes = 32 if chip.startswith("gfx1") else 64
    num_parameters = len(interface.buffers) + len(interface.constants)
    with _edited(lambda ir, shared: for_iree(ir, name, num_parameters, shared)):
        compiled = triton.compile(
            ASTSource(function, *_signature(function, interface, constexprs)),
            target=GPUTarget("hip", chip, lanes),
            options={"num_warps": tuning.num_waves, "num_stages": tuning.num_stages},
        )
    return CodeObject(name, compiled.asm["hsaco"], tuning.num_waves * lanes)


def _signature(
    function: Any, interface: Interface, constexprs: Mapping[str, int | bool]
) -> tuple[dict[str, str], dict[tuple[int], int | bool], dict[tuple[int], list[list[object]]]]:
    """Triton's types of all parameters, values of constexprs and attributes of buffers, by position."""
    names: list[str] = function.arg_names
    types = [_TYPES[buffer.dtype] for buffer in interface.buffers.values()]
    types += ["i32"] * len(interface.constants)
    types += ["constexpr"] * (len(names) - len(types))
    values = {(names.index(name),): value for name, value in constexprs.items()}
    aligned: dict[tuple[int], list[list[object]]] = {
        (position,): [["tt.divisibility", _ALIGNMENT]] for position in range(len(interface.buffers))
    }
    return dict(zip(names, types, strict=True)), values, aligned


class _edited:
    """Triton's stage that makes LLVM IR, followed by an edit, while the context is entered."""

    def __init__(self, edit: Callable[[str, int], str]) -> None:
        self._edit = edit

    def __enter__(self) -> None:
        from triton import knobs

        def inspect(backend: Any, stages: dict[str, Any], *_: Any) -> None:
            make = stages["llir"]
            stages["llir"] = lambda source, metadata: self._edit(make(source, metadata), metadata["shared"])

        knobs.runtime.add_stages_inspection_hook = inspect
        knobs.compilation.always_compile = True  # the hook is not part of the key of Triton's cache

    def __exit__(self, *_: object) -> None:
        from triton import knobs

        knobs.runtime.add_stages_inspection_hook = None
