"""Which GPUs are chosen; opening them is tested in test_hip_device.py and test_iree_gpu.py."""

from __future__ import annotations

import re

import pytest

from shortfin_apps.llm.components.runtime.device import GpuDriver
from shortfin_apps.llm.components.runtime.gpu_choice import select, unavailable
from shortfin_apps.llm.contract.errors import ArtifactError

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
    assert select("hip", device_ids, GPUS) == chosen


@pytest.mark.parametrize("device_id", ["3", "-1", "GPU-dd", "gpu-aa", ""])
def test_an_unknown_gpu_is_refused_with_the_known_ones(device_id: str) -> None:
    with pytest.raises(ArtifactError, match=rf"no AMD GPU '{device_id}'; .* 0 \(GPU-aa\), 1 \(GPU-bb\), 2"):
        select("hip", [device_id], GPUS)


@pytest.mark.parametrize("device_ids", [["1", "1"], ["1", "GPU-bb"], ["0", "GPU-bb", "1"]])
def test_a_gpu_named_twice_is_refused(device_ids: list[str]) -> None:
    with pytest.raises(ArtifactError, match=r"names the GPU GPU-bb twice; each pipeline stage needs its own"):
        select("hip", device_ids, GPUS)


def test_gpus_of_one_name_cannot_be_told_apart() -> None:
    """As parts of a partitioned GPU may have; the driver would open all of them."""
    with pytest.raises(ArtifactError, match=r"2 GPUs have the name GPU-aa, .*HIP_VISIBLE_DEVICES"):
        select("hip", ["0"], ["GPU-aa", "GPU-aa"])
    assert select("hip", ["2"], ["GPU-aa", "GPU-aa", "GPU-bb"]) == ["GPU-bb"]


NO_HIP = "UNAVAILABLE; HIP runtime library 'libamdhip64.so' not available: Tried: libamdhip64.so"
NO_CUDA = "CUDA driver library 'libcuda.so' not available; ensure it is in dynamic library search path"
MISMATCH = "CUDA driver error 'CUDA_ERROR_SYSTEM_DRIVER_MISMATCH' (803)\nand more"


@pytest.mark.parametrize(
    ("driver", "error", "said"),
    [
        ("hip", NO_HIP, r"libamdhip64.so\) was not found; install ROCm"),
        ("cuda", NO_CUDA, r"libcuda.so\) was not found; install NVIDIA's driver"),
        ("cuda", "CUDA driver error 'CUDA_ERROR_NO_DEVICE' (100)", "no NVIDIA GPU was found; .*`nvidia-smi`"),
        ("cuda", MISMATCH, r"be used \(.* \(803\)\); check `nvidia-smi`"),
        ("hip", None, "no AMD GPU was found; check `rocminfo`"),
    ],
)
def test_without_a_gpu_it_says_what_to_do(driver: GpuDriver, error: str | None, said: str) -> None:
    message = str(unavailable(driver, None if error is None else RuntimeError(error)))
    assert re.search(said, message)
    assert "`--device cpu`" in message
    assert "\n" not in message
