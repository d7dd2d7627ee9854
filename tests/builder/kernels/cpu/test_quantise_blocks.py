from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.quantise_blocks import QuantiseDispatchGeometry


@pytest.mark.parametrize(
    ("eps", "reads"),
    [(None, {"x": "memref<?x96xbf16>"}), (1e-5, {"x": "memref<?x96xf32>", "norm": "memref<96xf32>"})],
)
def test_what_is_normed_comes_in_f32(eps: float | None, reads: dict[str, str]) -> None:
    interface = QuantiseDispatchGeometry(96, eps).interface
    assert {name: buffer.type for name, buffer in interface.reads.items()} == reads
    assert interface.writes["blocks"].type == "memref<?x3x960xi8>"


def test_a_workgroup_writes_whole_rows_of_a_sixteen() -> None:
    assert 16 % QuantiseDispatchGeometry(96, None).row_block == 0
