from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.quantise_rows import QuantiseRowsGeometry


def test_workgroups_share_no_segment_of_a_tile() -> None:
    assert 16 % QuantiseRowsGeometry(576, "bf16", None).row_block == 0


@pytest.mark.parametrize(("eps", "reads"), [(None, ["x"]), (1e-5, ["x", "norm"])])
def test_a_norm_brings_its_weights(eps: float | None, reads: list[str]) -> None:
    assert list(QuantiseRowsGeometry(576, "f32", eps).interface.reads) == reads
