"""The chip that a driver reports; of HIP also on the emulated GPUs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from shortfin_apps.llm.components.runtime import gpu_chip as gpu_chip_module
from shortfin_apps.llm.components.runtime.gpu_chip import gpu_chip
from shortfin_apps.llm.components.runtime.open import host_of, hosts_at_hand
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import this_host
from shortfin_apps.llm.contract.host_gpu import HostGpu
from tests.hip import SETTINGS, EmulatedGpus


def library(name: bytes, offset: int, status: int = 0) -> Any:
    """HIP's library, whose structure has the chip's name at `offset`."""

    def properties(out: Any, ordinal: int) -> int:
        ctypes.memmove(ctypes.addressof(out), b"AMD Radeon RX 7900 XTX", 22)
        ctypes.memmove(ctypes.addressof(out) + offset, name, len(name))
        return status

    return SimpleNamespace(hipGetDeviceProperties=properties)


@pytest.mark.parametrize("offset", [396, 1160])  # ROCm 5's and ROCm 6's structure
@pytest.mark.parametrize(
    ("name", "chip"), [(b"gfx1100", "gfx1100"), (b"gfx90a:sramecc+:xnack-", "gfx90a"), (b"", None)]
)
def test_the_name_is_found_in_the_structure_of_any_release(
    monkeypatch: pytest.MonkeyPatch, name: bytes, chip: str | None, offset: int
) -> None:
    monkeypatch.setattr(gpu_chip_module, "loaded_library", lambda _: library(name, offset))
    assert gpu_chip("hip", 0) == chip


def test_a_driver_that_fails_or_is_not_loaded_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (library(b"gfx942", 396, status=1), None):
        monkeypatch.setattr(gpu_chip_module, "loaded_library", lambda _, found=found: found)
        assert gpu_chip("hip", 0) is None


def test_a_chip_that_is_named_is_believed() -> None:
    assert host_of("hip:gfx942") == HostGpu("hip", "gfx942")
    assert host_of("amdgpu:gfx942") == HostGpu("hip", "gfx942")
    assert host_of("local-task") == this_host()
    assert hosts_at_hand("cpu") == [this_host()]


@pytest.mark.emulated
@pytest.mark.parametrize("chip", ["gfx942", "gfx1151"])
def test_the_emulated_gpus_are_listed_with_their_chip(emulated_gpus: EmulatedGpus, chip: str) -> None:
    with emulated_gpus.watch(chip):
        assert hosts_at_hand("hip") == [HostGpu("hip", chip, ordinal) for ordinal in range(SETTINGS.devices)]
        assert host_of("hip", ["1"]) == HostGpu("hip", chip, 1)
        with pytest.raises(ArtifactError, match="there is no AMD GPU '9'"):
            host_of("hip", ["9"])
