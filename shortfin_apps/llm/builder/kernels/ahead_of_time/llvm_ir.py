"""Edits of the LLVM IR that Triton 3.9 generates, so that IREE 3.9 can launch the machine code.

- Triton adds two pointer parameters for scratch memory. IREE passes only the interface's operands, and HIP
  would read past their end. The edit drops these parameters, and refuses kernels that use them.
- Triton expects that the launch provides dynamic shared memory. IREE's launch provides none, so the edit
  makes the shared memory a static array in the code object.
- IREE looks up a kernel by the name of its export, so the edit renames the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shortfin_apps.llm.contract.errors import BuildError

MAX_SHARED_BYTES = 64 << 10  # LDS of a workgroup; above this, LLVM aborts the process

_KERNEL = re.compile(r"define amdgpu_kernel void @(?P<name>[\w$.]+)\((?P<parameters>(?:[^()]|\([^()]*\))*)\)")
_SHARED = re.compile(
    r"^@global_smem = external (?P<linkage>.*?)global \[0 x i8\], align (?P<align>\d+)$", re.M
)
# Hidden arguments of kernels, which only HIP's own launch provides.
_HIDDEN = ("dispatch.ptr", "queue.ptr", "implicitarg.ptr")


@dataclass(frozen=True, slots=True)
class _Parts:
    before: str
    parameters: list[str]
    after: str  # from the closing parenthesis (excluded) to the end of the module


def for_iree(ir: str, name: str, num_parameters: int, shared_bytes: int) -> str:
    """Return the module with its kernel renamed to `name`, and with static shared memory (LDS).

    The kernel keeps its first `num_parameters` parameters. Raises BuildError if the kernel uses anything
    that IREE does not pass, or more LDS than a workgroup has.
    """
    if shared_bytes > MAX_SHARED_BYTES:
        raise BuildError(
            f"kernel {name} needs {shared_bytes} bytes of LDS; a workgroup has {MAX_SHARED_BYTES}"
        )
    parts = _split(ir)
    body = parts.after[: parts.after.index("\n}")]
    for parameter in parts.parameters[num_parameters:]:
        _check_unused(name, parameter, body)
    for hidden in _HIDDEN:
        if hidden in body:
            raise BuildError(f"kernel {name} needs {hidden}, which IREE does not pass")
    kept = ", ".join(parts.parameters[:num_parameters])
    before = _with_static_shared_memory(parts.before, shared_bytes)
    return f"{before}define amdgpu_kernel void @{name}({kept}){_with_entry_label(parts)}"


def _split(ir: str) -> _Parts:
    match = _KERNEL.search(ir)
    if match is None:
        raise BuildError("Triton's LLVM IR has no kernel; another release of Triton than 3.9?")
    parameters = [each.strip() for each in re.split(r",(?![^()]*\))", match["parameters"])]
    return _Parts(ir[: match.start()], parameters, ir[match.end() :])


def _check_unused(name: str, parameter: str, body: str) -> None:
    value = parameter.split()[-1]
    if not parameter.startswith("ptr addrspace(1)") or re.search(re.escape(value) + r"\b", body):
        raise BuildError(f"kernel {name} uses {parameter}, which IREE does not pass")


def _with_static_shared_memory(globals_: str, shared_bytes: int) -> str:
    static = rf"@global_smem = internal \g<linkage>global [{shared_bytes} x i8] poison, align \g<align>"
    return _SHARED.sub(static, globals_)


def _with_entry_label(parts: _Parts) -> str:
    """Write the number of the entry block, to which phis refer, as an explicit label.

    LLVM numbers an unlabelled entry block by the number of parameters, of which the edit drops some.
    """
    return re.sub(r"\{\n(?=\s)", f"{{\n{len(parts.parameters)}:\n", parts.after, count=1)
