from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.lowering.dispatch import dispatch

INTERFACE = Interface(
    constants=("rows", "layer"),
    reads={"x": buffer("f32", "rows", 8)},
    writes={"cache": buffer("bf16", "pages", 4), "y": buffer("i8", "rows", 8)},
)


def test_operands_stand_in_the_interfaces_order_and_results_have_its_shapes() -> None:
    e = Emitter()
    cache = Tensor("%cache", ("%pages", 4), "bf16")
    operands: dict[str, int | str | Tensor] = {
        "x": Tensor("%x", ("%rows", 8), "f32"),
        "cache": cache,
        "layer": 3,
        "rows": "%rows",
    }
    written = dispatch(e, "kernel", INTERFACE, ["%rows"], operands)
    assert (written["y"].shape, written["y"].dtype) == (("%rows", 8), "i8")
    assert (written["cache"].shape, written["cache"].dtype) == (cache.shape, "bf16")
    assert "@kernel::@kernel[%rows](" in e.lines[-1]
    assert ", %x, %cache) : (i32, i32, tensor<?x8xf32>{%rows}, tensor<?x4xbf16>{%pages})" in e.lines[-1]
