"""Memory cut into named regions."""

from __future__ import annotations

from shortfin_apps.llm.builder.kernels.fused.regions import Regions


def test_regions_follow_one_another() -> None:
    regions = Regions({"config": 64, "nothing": 0, "sums": 128})
    assert regions.offsets == {"config": 0, "nothing": 64, "sums": 64}
    assert regions.bytes == 192
