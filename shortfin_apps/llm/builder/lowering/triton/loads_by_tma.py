"""What the forms for Hopper of a matmul have in common: loads by TMA, and tiles taken in turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.ahead_of_time.ptx import SCRATCH, SCRATCH_ALIGNMENT
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import linear

PROGRAMS = 132  # multiprocessors of an H100 SXM or H200; smaller GPUs run the workgroups one after another
_HEAD_DIM = 128  # other heads were not checked on a GPU


def with_loads_by_tma(
    kernel: Kernel,
    function: Any,
    sizes: Mapping[str, int],
    rows: int,
    columns: int,
    stages: int,
    maps_bytes: int,
) -> Kernel:
    """Return a matmul with another `function`, whose constants `sizes` describe its tiles.

    Tiles have `rows` tokens and `columns` rows of the weight. The kernel writes its tensor maps, of
    `maps_bytes` for each workgroup, to a buffer `scratch`, which callers need not read.
    """
    interface = kernel.interface
    scratch = buffer("i8", PROGRAMS * maps_bytes + SCRATCH_ALIGNMENT)
    interface = replace(interface, writes={**interface.writes, SCRATCH: scratch})
    return Kernel(
        name=re.sub(r"_\d+x\d+x\d+(r\d+)?(?=_|$)", f"_hopper_{rows}x{columns}", kernel.name),
        function=function,
        interface=interface,
        constexprs=_constants_of(function.arg_names, interface, {**kernel.constexprs, **sizes}),
        grid=[Tiles("tokens", rows, times=shape_of(kernel)[0] // columns, most=PROGRAMS)],
        tuning=Tuning(num_waves=4, num_stages=stages),
    )


def _constants_of(
    names: list[str], interface: Interface, constants: Mapping[str, Constexpr]
) -> dict[str, Constexpr]:
    given = {*interface.buffers, *interface.constants}
    return {name: constants[name] for name in names if name not in given}


def is_plain(kernel: Kernel) -> bool:
    """Whether a matmul's epilogue is one that the forms for Hopper have."""
    buffers, constants = kernel.interface.buffers, kernel.constexprs
    if kernel.function is linear.gated_linear:
        return constants["ACTIVATION"] == "silu"
    if kernel.function is linear.linear:
        return True
    has_neither = not {"bias", "head_norm"} & buffers.keys() and buffers["cache"].dtype == "bf16"
    return has_neither and constants["HEAD_DIM"] == _HEAD_DIM


def shape_of(kernel: Kernel) -> tuple[int, int]:
    """Return the output and input features of a matmul."""
    out_features, in_features = kernel.interface.reads["w"].shape[0], kernel.constexprs["IN"]
    assert isinstance(out_features, int)
    assert isinstance(in_features, int)
    return out_features, in_features
