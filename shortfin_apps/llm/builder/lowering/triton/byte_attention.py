"""The choice of the form in Gluon of attention over a cache in bytes (kernels/triton/byte_attention.py)."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tuning
from shortfin_apps.llm.builder.kernels.triton import attention, byte_attention
from shortfin_apps.llm.builder.lowering.triton.tiles import may_be_many

_HEAD_DIM = 4 * byte_attention.WORDS.value
_STRIDE, _MOST_SHARING = byte_attention.PAGE.value, byte_attention.QUERIES.value
_ABSENT = ("WINDOW", "CAP", "TAIL", "sinks")


def byte_form(kernel: Kernel, rows: Dim | Tensor | None) -> Kernel:
    """Return the form of `attend_singles` for many rows of a cache in bytes; `kernel` itself if it has none.

    It takes 0.7 to 0.9 of the time (docs/measurements.md). For few rows its workgroups, of one warp each, are
    too few. `kernel` must be without its absent operands.
    """
    if rows is None or isinstance(rows, Tensor) or not may_be_many(rows) or not takes(kernel):
        return kernel
    function = byte_attention.attend_singles
    return replace(
        kernel,
        name=kernel.name.replace("attend_singles", "attend_bytes"),
        function=function,
        constexprs={n: value for n, value in kernel.constexprs.items() if n in function.arg_names},
        tuning=Tuning(num_waves=1),
    )


def takes(kernel: Kernel) -> bool:
    """Whether the form computes all that `kernel` does."""
    if kernel.function is not attention.attend_singles:
        return False
    buffers, constants = kernel.interface.buffers, kernel.constexprs
    heads, kv_heads, split = (constants[name] for name in ("HEADS", "KV_HEADS", "SPLIT"))
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    assert isinstance(split, int)
    return (
        buffers["cache"].dtype == "i8"
        and buffers["q"].dtype in ("bf16", "f16")  # queries become f16
        and constants["HEAD_DIM"] == _HEAD_DIM
        and constants["STRIDE"] == _STRIDE
        and split % _STRIDE == 0
        and heads // kv_heads <= _MOST_SHARING
        and not constants["SHARES"]
        and all(constants.get(name, "present") is None for name in _ABSENT)
    )
