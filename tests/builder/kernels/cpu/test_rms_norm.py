from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.kernels.cpu.rms_norm import RmsNormGeometry


@pytest.mark.parametrize(
    ("size", "lanes", "accumulators"), [(576, 16, 4), (64, 16, 4), (80, 16, 1), (16, 16, 1), (24, 8, 1)]
)
def test_accumulators_divide_the_row(size: int, lanes: int, accumulators: int) -> None:
    geometry = RmsNormGeometry(size, 1e-5, "bf16", has_bf16=True)
    assert (geometry.lanes, geometry.accumulators) == (lanes, accumulators)
    assert size % geometry.step == 0
