"""Which GPUs are chosen; opening them is tested in test_hip_device.py."""

from __future__ import annotations

import pytest

pytest.importorskip("shortfin", reason="shortfin is not installed")

from shortfin_apps.llm.components.runtime.hip import select
from shortfin_apps.llm.errors import ArtifactError

GPUS = ["GPU-aa", "GPU-bb", "GPU-cc"]


@pytest.mark.parametrize(
    ("device_ids", "chosen"),
    [
        (["0"], ["GPU-aa"]),
        (["2", "0"], ["GPU-cc", "GPU-aa"]),
        (["GPU-bb"], ["GPU-bb"]),
        (["GPU-cc", "1"], ["GPU-cc", "GPU-bb"]),
    ],
)
def test_gpus_are_chosen_by_index_or_name_in_the_order_given(
    device_ids: list[str], chosen: list[str]
) -> None:
    assert select(device_ids, GPUS) == chosen


@pytest.mark.parametrize("device_id", ["3", "-1", "GPU-dd", "gpu-aa", ""])
def test_an_unknown_gpu_is_refused_with_the_known_ones(device_id: str) -> None:
    with pytest.raises(ArtifactError, match=rf"no AMD GPU '{device_id}'; .* 0 \(GPU-aa\), 1 \(GPU-bb\), 2"):
        select([device_id], GPUS)


@pytest.mark.parametrize("device_ids", [["1", "1"], ["1", "GPU-bb"], ["0", "GPU-bb", "1"]])
def test_a_gpu_named_twice_is_refused(device_ids: list[str]) -> None:
    with pytest.raises(ArtifactError, match=r"names the GPU GPU-bb twice; each pipeline stage needs its own"):
        select(device_ids, GPUS)


def test_gpus_of_one_name_cannot_be_told_apart() -> None:
    """As parts of a partitioned GPU may have; the driver would open all of them."""
    with pytest.raises(ArtifactError, match=r"2 GPUs have the name GPU-aa, .*HIP_VISIBLE_DEVICES"):
        select(["0"], ["GPU-aa", "GPU-aa"])
    assert select(["2"], ["GPU-aa", "GPU-aa", "GPU-bb"]) == ["GPU-bb"]
