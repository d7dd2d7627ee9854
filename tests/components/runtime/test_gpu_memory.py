"""Free memory of GPUs: as the driver reports it, and of APUs as the kernel does."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shortfin_apps.llm.components.runtime import gpu_memory, memory
from shortfin_apps.llm.components.runtime.gpu_memory import (
    spare_apu_bytes,
    spare_gpu_bytes,
    spare_hip_bytes,
)
from shortfin_apps.llm.components.runtime.open import open_device
from tests.hip import EmulatedGpus

GIB = 1 << 30
MODERN = "6.14.0-37-generic"


def get_info(free: float, total: float) -> Any:
    """HipMemGetInfo or cuMemGetInfo of a GPU with so many bytes."""

    def call(free_bytes: Any, total_bytes: Any) -> int:
        free_bytes._obj.value, total_bytes._obj.value = int(free), int(total)
        return 0

    return call


def apu(folder: Path, *, vram: float, gtt: float, vram_used: float = 0, gtt_used: float = 0) -> Path:
    """The kernel's folder of an APU's GPU with pools of so many GiB."""
    folder.mkdir(exist_ok=True)
    sizes = {"vram_total": vram, "vram_used": vram_used, "gtt_total": gtt, "gtt_used": gtt_used}
    for name, size in sizes.items():
        (folder / f"mem_info_{name}").write_text(f"{int(size * GIB)}\n")
    return folder


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a recent Linux and 100 GiB available, without control groups and PCI devices."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {100 << 20} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(gpu_memory, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(platform, "release", lambda: MODERN)
    return tmp_path


@pytest.mark.parametrize(("free", "total", "expected"), [(900, 1000, 800), (50, 1000, 0)])
def test_a_tenth_of_a_gpu_is_left_alone(free: int, total: int, expected: int) -> None:
    assert spare_gpu_bytes(get_info(free, total)) == expected


def test_a_driver_that_refuses_tells_nothing() -> None:
    assert spare_gpu_bytes(lambda free, total: 1) is None


def test_without_its_library_a_gpu_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "HIP", "libnothing.so")
    assert spare_hip_bytes(0) is None


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        # Strix Halo with 128 GiB and the smallest carve-out: half of the host's 100 GiB.
        ({"vram": 0.5, "gtt": 128}, 50),
        ({"vram": 0.5, "gtt": 60, "gtt_used": 20}, 34),
        ({"vram": 0.5, "gtt": 60, "gtt_used": 58}, 0),
        # A carve-out that firmware made larger serves everything, whatever the host has.
        ({"vram": 96, "gtt": 16, "vram_used": 10}, 76.4),
        ({"vram": 32, "gtt": 32}, 28.8),
    ],
)
def test_the_larger_pool_of_an_apu_serves_all(host: Path, pools: dict[str, float], expected: float) -> None:
    assert spare_apu_bytes(apu(host / "gpu", **pools)) == pytest.approx(expected * GIB)


@pytest.mark.parametrize("release", ["6.9.12", "5.15.0-100-generic", "unknown"])
def test_before_linux_6_10_only_the_carve_out_serves(
    host: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert spare_apu_bytes(apu(host / "gpu", vram=4, gtt=60, vram_used=1)) == pytest.approx(2.6 * GIB)


def test_a_host_that_does_not_tell_its_memory_limits_nothing(host: Path) -> None:
    (host / "meminfo").unlink()
    assert spare_apu_bytes(apu(host / "gpu", vram=1, gtt=100)) == pytest.approx(90 * GIB)


@pytest.mark.parametrize("name", ["mem_info_vram_total", "mem_info_gtt_used"])
def test_a_pool_that_the_kernel_does_not_report_is_unknown(host: Path, name: str) -> None:
    folder = apu(host / "gpu", vram=1, gtt=100)
    (folder / name).write_text("?")
    assert spare_apu_bytes(folder) is None
    (folder / name).unlink()
    assert spare_apu_bytes(folder) is None


def hip(chip: str, **functions: Any) -> Any:
    """HIP's library on a machine with one GPU, of 15.5 GiB as it says."""

    def properties(out: Any, ordinal: int) -> int:
        out.raw = chip.encode().ljust(len(out), b"\0")
        return 0

    def bus_id(out: Any, size: int, ordinal: int) -> int:
        out.value = b"0000:C4:00.0"
        return 0

    known = {"hipSetDevice": lambda ordinal: 0, "hipMemGetInfo": get_info(15 * GIB, 15.5 * GIB)}
    known |= {"hipGetDeviceProperties": properties, "hipDeviceGetPCIBusId": bus_id}
    return SimpleNamespace(**known | functions)


@pytest.mark.parametrize(
    ("chip", "functions", "has_folder", "expected"),
    [
        ("gfx1151", {}, True, 50),
        ("gfx1151", {}, False, 13.45),
        ("gfx1151", {"hipDeviceGetPCIBusId": lambda out, size, ordinal: 1}, True, 13.45),
        ("gfx1100", {}, True, 13.45),  # a card has its own memory, and may use GTT for other things
        ("gfx9999", {}, True, 13.45),
    ],
)
def test_an_apu_is_asked_of_the_kernel_and_a_card_of_hip(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    chip: str,
    functions: dict[str, Any],
    has_folder: bool,
    expected: float,
) -> None:
    if has_folder:
        apu(host / "0000:c4:00.0", vram=0.5, gtt=120)
    library = hip(chip, **functions)
    monkeypatch.setattr(gpu_memory, "loaded_library", lambda name: library)
    monkeypatch.setattr("shortfin_apps.llm.components.runtime.gpu_chip.loaded_library", lambda name: library)
    assert spare_hip_bytes(0) == pytest.approx(expected * GIB)


@pytest.mark.emulated
@pytest.mark.parametrize(("chip", "is_apu"), [("gfx1151", True), ("gfx1100", False)])
def test_an_emulated_apu_has_what_the_kernel_says(
    emulated_gpus: EmulatedGpus, host: Path, chip: str, is_apu: bool
) -> None:
    apu(host / "ffff:01:00.0", vram=0.5, gtt=8, gtt_used=1)
    with emulated_gpus.watch(chip):
        device = open_device("hip", "iree")
        try:
            spare = device.spare_bytes()
        finally:
            device.close()
    assert (spare == pytest.approx(6.2 * GIB)) == is_apu
