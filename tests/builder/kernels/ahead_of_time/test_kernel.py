"""Kernels as described, before they are compiled."""

from __future__ import annotations

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Grid, Kernel, Tiles
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer

KERNEL = Kernel(
    name="add",
    function=None,
    interface=Interface(
        constants=("rows",),
        reads={"x": buffer("f32", "rows"), "bias": buffer("f32", "rows")},
        writes={"y": buffer("f32", "rows"), "sums": buffer("f32", 1)},
    ),
    constexprs={"BLOCK": 16},
    grid=[Tiles("rows", 16)],
)


def test_absent_buffers_are_none_in_the_function_and_no_operands() -> None:
    kept = KERNEL.without({"bias", "sums"})
    assert kept.name == "add_without_bias_without_sums"
    assert (list(kept.interface.reads), list(kept.interface.writes)) == (["x"], ["y"])
    assert kept.constexprs == {"BLOCK": 16, "bias": None, "sums": None}
    assert KERNEL.without(set()) is KERNEL


def test_numbers_of_the_grid_are_its_workload_once_each() -> None:
    grid: Grid = [Tiles("rows", 16, more="splits"), 4, Tiles("splits")]
    kernel = Kernel(name="add", function=None, interface=KERNEL.interface, constexprs={}, grid=grid)
    assert kernel.workload == ("rows", "splits")
