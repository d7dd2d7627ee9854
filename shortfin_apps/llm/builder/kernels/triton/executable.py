"""IREE's executables around code objects, as MLIR text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface
from shortfin_apps.llm.builder.kernels.triton.compile import CodeObject


@dataclass(frozen=True, slots=True)
class Tiles:
    """Workgroups of one dimension of the grid: operand `workload` of the dispatch, in tiles of `size`."""

    workload: int
    size: int = 1


Grid = Sequence[int | Tiles]  # up to three dimensions, x first


def executable(code: CodeObject, interface: Interface, num_workloads: int, grid: Grid) -> str:
    """`hal.executable.source` of `code`, to be dispatched as `@name::@name[workloads](...)`.

    In the generic form, as IREE 3.13 parses no other with objects.
    """
    arguments = "".join(f", %w{n}: index" for n in range(num_workloads))
    counts = [_count(axis, each) for axis, each in zip("xyz", [*grid, 1, 1], strict=False)]
    image = f'dense<"0x{code.image.hex().upper()}"> : vector<{len(code.image)}xi8>'
    return f"""\
"hal.executable.source"() <{{sym_name = "{code.name}", sym_visibility = "private",
  objects = #hal.executable.objects<{{#hal.executable.target<"rocm", "rocm-hsaco-fb"> = [
    #hal.executable.object<{{path = "{code.name}.hsaco", data = {image}}}>]}}>}}> ({{
  "hal.executable.export"() <{{sym_name = "{code.name}", sym_visibility = "public", ordinal = 0 : index,
    layout = {interface.layout},
    workgroup_size = [{code.threads} : index, 1 : index, 1 : index]}}> ({{
  ^bb0(%device: !hal.device{arguments}):
{"".join(counts)}    hal.return %x, %y, %z : index, index, index
  }}, {{}}) : () -> ()
  "hal.executable.source_end"() : () -> ()
}}) : () -> ()
"""


def _count(axis: str, extent: int | Tiles) -> str:
    if isinstance(extent, int):
        return f"    %{axis} = arith.constant {extent} : index\n"
    return (
        f"    %{axis}.size = arith.constant {extent.size} : index\n"
        f"    %{axis} = arith.ceildivui %w{extent.workload}, %{axis}.size : index\n"
    )
