from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from shortfin_apps.llm.builder.kernels.cpu.matmul_int8 import MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.weights.layout import Int8Panels

STORE = MatmulInt8Geometry(n=960, k_size=576, epilogue="store", source="tiles", eps=None, has_bf16=True)


@pytest.mark.parametrize("k_size", [576, 96, 1536])
def test_panels_are_read_as_they_are_stored(k_size: int) -> None:
    shape, _ = Int8Panels(gated=False).stored("w", (960, k_size))["w"]
    geometry = replace(STORE, k_size=k_size)
    assert geometry.grid.panels == shape[0]
    assert geometry.panel_bytes == prod(shape[1:])


@pytest.mark.parametrize(("k_size", "rows"), [(576, 256), (8192, 96), (65536, 32)])
def test_a_workgroups_rows_stay_in_the_second_level_cache(k_size: int, rows: int) -> None:
    assert replace(STORE, k_size=k_size).grid.row_block == rows


@pytest.mark.parametrize(
    ("source", "eps", "epilogue", "reads"),
    [
        ("tiles", None, "store", ["tiles", "x_scales", "w", "w_scales"]),
        ("f32", 1e-5, "silu", ["x", "norm", "w", "w_scales"]),
        ("bf16", None, "residual", ["x", "w", "w_scales", "residual"]),
    ],
)
def test_operands_follow_the_source(
    source: str, eps: float | None, epilogue: Epilogue, reads: list[str]
) -> None:
    geometry = replace(STORE, source=source, eps=eps, epilogue=epilogue)
    assert list(geometry.interface.reads) == reads
