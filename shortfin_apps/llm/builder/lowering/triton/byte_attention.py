"""The choice of the form in Gluon of attention over a cache in bytes (kernels/triton/byte_attention.py)."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor, room
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tuning
from shortfin_apps.llm.builder.kernels.triton import attention, byte_attention
from shortfin_apps.llm.builder.lowering.triton.tiles import FEW_ROWS

_HEAD_DIM, _STRIDE, _MOST_SHARING = 128, 16, 16  # those of the kernel's matrix instructions and steps
_ABSENT = ("WINDOW", "CAP", "TAIL", "sinks")


def byte_form(kernel: Kernel, rows: Dim | Tensor | None) -> Kernel:
    """Return the form of `attend_singles` for many rows of a cache in bytes; `kernel` itself if it has none.

    It takes 0.8 of the time (docs/measurements.md). For few rows it has too few workgroups. `kernel` must be
    without its absent operands.
    """
    if not _is_many(rows) or not takes(kernel):
        return kernel
    function, interface = byte_attention.attend_singles, kernel.interface
    names = function.arg_names
    return Kernel(
        name=kernel.name.replace("attend_singles", "attend_bytes"),
        function=function,
        interface=replace(interface, reads={n: each for n, each in interface.reads.items() if n in names}),
        constexprs={n: value for n, value in kernel.constexprs.items() if n in names},
        grid=kernel.grid,
        tuning=Tuning(num_waves=1),
    )


def takes(kernel: Kernel) -> bool:
    """Whether the form computes all that `kernel` does."""
    if kernel.function is not attention.attend_singles:
        return False
    buffers, constants = kernel.interface.buffers, kernel.constexprs
    heads, kv_heads = constants["HEADS"], constants["KV_HEADS"]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    return (
        buffers["cache"].dtype == "i8"
        and buffers["q"].dtype in ("bf16", "f16")  # queries become f16
        and constants["HEAD_DIM"] == _HEAD_DIM
        and constants["STRIDE"] == _STRIDE
        and heads // kv_heads <= _MOST_SHARING
        and not constants["SHARES"]
        and all(constants.get(name, "present") is None for name in _ABSENT)
    )


def _is_many(rows: Dim | Tensor | None) -> bool:
    """Whether a batch may have more than FEW_ROWS rows."""
    if rows is None or isinstance(rows, Tensor):
        return False
    most = room(rows)
    return isinstance(most, str) or most > FEW_ROWS
