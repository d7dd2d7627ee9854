"""Compile kernels of Triton and Gluon ahead of time: to machine code for AMD GPUs, to PTX for NVIDIA's.

Only a build needs Triton. Builds cache code (kernel_cache.py); Triton's own cache is used in addition if
TRITON_CACHE_DIR, its variable, names a folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.kernels.ahead_of_time import llvm_ir, ptx
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles
from shortfin_apps.llm.contract.errors import BuildError

_POINTERS = {
    "f32": "*fp32",
    "f16": "*fp16",
    "bf16": "*bf16",
    "f8E4M3FN": "*fp8e4nv",
    "f8E4M3FNUZ": "*fp8e4b8",
    "i64": "*i64",
    "i32": "*i32",
    "i8": "*i8",
}
_WARP = 32  # lanes
_PTX_VERSION = 84  # PTX 8.4, of CUDA 12.4: drivers reject versions newer than their own
_GLUON_PTX_VERSION = 86  # the least that Triton has TMA loads for; ptx.py makes it PTX 8.4
_ALIGNMENT = 16  # bytes, for every buffer that IREE passes; lets Triton load 16 bytes per lane

Signature = dict[str, str]
Constants = dict[tuple[int], Constexpr]
Attributes = dict[tuple[int], list[list[object]]]


@dataclass(frozen=True, slots=True)
class CodeObject:
    """Code of one kernel, launched in workgroups of `threads` lanes.

    A workgroup has `shared_bytes` of dynamic shared memory (LDS).
    """

    image: bytes
    threads: int
    shared_bytes: int = 0


def compile_kernel(kernel: Kernel, architecture: str, chip: str) -> CodeObject:
    """Compile `kernel` for a chip of the architecture "nvptx" or "amdgpu".

    Raises BuildError if IREE could not launch the result.
    """
    return _for_nvidia(kernel, chip) if architecture == "nvptx" else _for_amd(kernel, chip)


def _for_amd(kernel: Kernel, chip: str) -> CodeObject:
    lanes = 32 if chip.startswith("gfx1") else 64
    # Use one kind of matrix instruction, so that tiles of all sizes add in the same order.
    options = {"matrix_instr_nonkdim": 16}
    edit = f"{kernel.name} {_num_operands(kernel)} {_version_of_edit()}"
    with _edited(lambda ir, shared: llvm_ir.for_iree(ir, kernel.name, _num_operands(kernel), shared), edit):
        compiled = _compile(kernel, ("hip", chip, lanes), options)
    return CodeObject(compiled.asm["hsaco"], kernel.tuning.num_waves * lanes)


def _for_nvidia(kernel: Kernel, chip: str) -> CodeObject:
    is_gluon = kernel.function.is_gluon()
    options = {
        "ptx_version": _GLUON_PTX_VERSION if is_gluon else _PTX_VERSION,
        "maxnreg": kernel.tuning.max_registers,
    }
    with _chosen_cache():
        compiled = _compile(kernel, ("cuda", int(re.sub(r"\D", "", chip)), _WARP), options)
    metadata, text = compiled.metadata, compiled.asm["ptx"]
    most = kernel.most_shared_bytes
    if most is not None and metadata.shared > most:
        raise BuildError(
            f"kernel {kernel.name} takes {metadata.shared} bytes of shared memory per workgroup, of which at "
            f"most {most} let all its workgroups run at the same time; build with --no-one-launch"
        )
    if is_gluon:
        text = ptx.without_newer_loads(text, kernel.name)
    scratch = _scratch(kernel, metadata.global_scratch_size)
    text = ptx.for_iree(text, kernel.name, _num_operands(kernel), scratch)
    # The warps include those that a workgroup has in addition for other roles.
    return CodeObject(text.encode(), metadata.num_warps * _WARP, metadata.shared)


def _scratch(kernel: Kernel, num_bytes: int) -> int | None:
    """Return the index of the operand `scratch`, or None if the kernel has none.

    Raises BuildError if it lacks room for `num_bytes` of each workgroup.
    """
    buffers, programs = kernel.interface.buffers, kernel.grid[0]
    if ptx.SCRATCH not in buffers:
        return None
    [room] = buffers[ptx.SCRATCH].shape
    most = programs.most if isinstance(programs, Tiles) else programs
    if not isinstance(room, int) or most is None or room < most * num_bytes + ptx.SCRATCH_ALIGNMENT:
        raise BuildError(f"kernel {kernel.name} needs {num_bytes} bytes of `{ptx.SCRATCH}` per workgroup")
    return list(buffers).index(ptx.SCRATCH)


def _num_operands(kernel: Kernel) -> int:
    return len(kernel.interface.buffers) + len(kernel.interface.constants)


def _compile(kernel: Kernel, target: tuple[str, str | int, int], options: dict[str, Any]) -> Any:
    """Compile `kernel` with Triton for `target`: (backend, chip, lanes of a wave)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource

    tuning = {"num_warps": kernel.tuning.num_waves, "num_stages": kernel.tuning.num_stages}
    source = GluonASTSource if kernel.function.is_gluon() else ASTSource
    with _known_to_kernels(GPUTarget(*target)):
        return triton.compile(
            source(kernel.function, *_signature(kernel)),
            target=GPUTarget(*target),
            options={"enable_fp_fusion": kernel.tuning.fuses_products, **tuning, **options},
        )


@contextmanager
def _known_to_kernels(target: Any) -> Iterator[None]:
    """Let kernels query `target` with triton.language.target_info, which reads it from Triton's driver."""
    from triton.runtime import driver

    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver.set_active(None)


@dataclass(frozen=True, slots=True)
class _Driver:
    """A stand-in for Triton's driver, with the one method that target_info calls."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target


def _signature(kernel: Kernel) -> tuple[Signature, Constants, Attributes]:
    """Return the types of the parameters, the values of constexprs, and the attributes of buffers.

    The types are by name, the other two by position.
    """
    names: list[str] = kernel.function.arg_names
    operands = {name: _POINTERS[buffer.dtype] for name, buffer in kernel.interface.buffers.items()}
    attributes: Attributes = {(names.index(name),): [["tt.divisibility", _ALIGNMENT]] for name in operands}
    operands |= dict.fromkeys(kernel.interface.constants, "i32")
    assert [name for name in names if name in operands] == list(operands), kernel.name
    assert set(names) == {*operands, *kernel.constexprs}, kernel.name
    constants: Constants = {(names.index(name),): value for name, value in kernel.constexprs.items()}
    return {name: operands.get(name, "constexpr") for name in names}, constants, attributes


@cache
def _version_of_edit() -> str:
    return hashlib.sha256(Path(llvm_ir.__file__).read_bytes()).hexdigest()


@contextmanager
def _edited(edit: Callable[[str, int], str], key: str) -> Iterator[None]:
    """Apply `edit` to the output of Triton's LLVM IR stage; `key` identifies the edit in Triton's cache.

    `edit` takes the LLVM IR and the kernel's bytes of shared memory.
    """
    from triton import knobs

    def inspect(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:  # Triton asks for the hook's part of the cache key
            return key, hashlib.sha256(key.encode()).hexdigest()
        stages: dict[str, Any] = arguments[1]
        make = stages["llir"]
        stages["llir"] = lambda source, metadata: edit(make(source, metadata), metadata["shared"])
        return None

    with _chosen_cache(), knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = inspect
        yield


@contextmanager
def _chosen_cache() -> Iterator[None]:
    """Use Triton's cache folder if the user chose one; otherwise a temporary folder."""
    from triton import knobs

    if os.environ.get("TRITON_CACHE_DIR"):
        yield
        return
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield
