"""Common to the forms for Hopper of a matmul: loads by TMA, and tiles that workgroups take in turns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.ahead_of_time.ptx import SCRATCH, SCRATCH_ALIGNMENT
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer

PROGRAMS = 132  # multiprocessors of an H100 SXM or H200; smaller GPUs run the workgroups one after another
_LEAST_TIME = 85  # of a tile with a smaller size (see `time_of`)


def with_loads_by_tma(
    kernel: Kernel,
    function: Any,
    sizes: Mapping[str, int],
    tile: tuple[int, int],
    stages: int,
    maps_bytes: int,
) -> Kernel:
    """Return a matmul with another `function`, whose constants `sizes` describe its tiles.

    `tile`: tokens and rows of the weight of a tile. The kernel writes its tensor maps, of
    `maps_bytes` for each workgroup, to a buffer `scratch`, which callers need not read.
    """
    rows, columns = tile
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


def time_of(kernel: Kernel, tokens: int, tile: tuple[int, int]) -> int:
    """Return how long a matmul takes with tiles of (tokens, rows of the weight), in an arbitrary unit.

    It is the time of the workgroup with the most tiles. On an H200, a tile with 64 tokens or rows of the
    weight takes 0.65 to 0.72 of the time of one with 128, as it loads more for each of its products.
    """
    turns = -(-num_tiles(kernel, tokens, tile) // PROGRAMS)
    return turns * math.prod(max(size, _LEAST_TIME) for size in tile)


def num_tiles(kernel: Kernel, tokens: int, tile: tuple[int, int]) -> int:
    """Return the number of tiles of (tokens, rows of the weight) of a matmul."""
    rows, columns = tile
    return -(-tokens // rows) * (shape_of(kernel)[0] // columns)


def shape_of(kernel: Kernel) -> tuple[int, int]:
    """Return the output and input features of a matmul."""
    out_features, in_features = kernel.interface.reads["w"].shape[0], kernel.constexprs["IN"]
    assert isinstance(out_features, int)
    assert isinstance(in_features, int)
    return out_features, in_features
