"""IREE executables with compiled code objects, as MLIR."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles

_FORMATS = {"amdgpu": ('"rocm", "rocm-hsaco-fb"', "hsaco"), "nvptx": ('"cuda", "cuda-nvptx-fb"', "ptx")}


def executable(kernel: Kernel, code: CodeObject, architecture: str) -> str:
    """Return the `hal.executable.source` of `code`, dispatched as `@name::@name[workload](...)`.

    The MLIR is in the generic form of operations, the only one in which IREE 3.13 parses code objects.
    """
    name, operands = kernel.name, {each: f"%w{n}" for n, each in enumerate(kernel.workload)}
    arguments = "".join(f", {operand}: index" for operand in operands.values())
    counts = [_count(axis, each, operands) for axis, each in zip("xyz", [*kernel.grid, 1, 1], strict=False)]
    image = f'dense<"0x{code.image.hex().upper()}"> : vector<{len(code.image)}xi8>'
    target, suffix = _FORMATS[architecture]
    shared = f", workgroup_local_memory = {code.shared_bytes} : index" if code.shared_bytes else ""
    return f"""\
"hal.executable.source"() <{{sym_name = "{name}", sym_visibility = "private",
  objects = #hal.executable.objects<{{#hal.executable.target<{target}> = [
    #hal.executable.object<{{path = "{name}.{suffix}", data = {image}}}>]}}>}}> ({{
  "hal.executable.export"() <{{sym_name = "{name}", sym_visibility = "public", ordinal = 0 : index,
    layout = {kernel.interface.layout},
    workgroup_size = [{code.threads} : index, 1 : index, 1 : index]{shared}}}> ({{
  ^bb0(%device: !hal.device{arguments}):
{"".join(counts)}    hal.return %x, %y, %z : index, index, index
  }}, {{}}) : () -> ()
  "hal.executable.source_end"() : () -> ()
}}) : () -> ()
"""


def _count(axis: str, extent: int | Tiles, operands: Mapping[str, str]) -> str:
    """Return the MLIR that computes the number of workgroups along `axis`, as %x, %y or %z."""
    if isinstance(extent, int):
        return f"    %{axis} = arith.constant {extent} : index\n"
    more = None if extent.more is None else operands[extent.more]
    steps: list[tuple[str, str, int | str | None]] = [
        ("tiles", "ceildivui", extent.size),
        ("all", "muli", None if extent.times == 1 else extent.times),
        ("sum", "addi", more),
        ("count", "minui", extent.most),
    ]
    text, value = "", operands[extent.operand]
    for name, operation, second in steps:
        if isinstance(second, int):
            text += f"    %{axis}.{name}.by = arith.constant {second} : index\n"
            second = f"%{axis}.{name}.by"
        if second is not None:
            text += f"    %{axis}.{name} = arith.{operation} {value}, {second} : index\n"
            value = f"%{axis}.{name}"
    return text.replace(f"{value} =", f"%{axis} =")
