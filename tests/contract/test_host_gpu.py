"""The GPUs of a machine: AMD's from copies of the kernel's list, NVIDIA's from a driver that is faked."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract import host_gpu
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_gpu import HostGpu, device_of_this_machine, nvidia_chip

CPU = 0


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_gpu, "NODES", tmp_path)
    return tmp_path


def fill(nodes: Path, *versions: int) -> None:
    for number, version in enumerate(versions):
        (nodes / str(number)).mkdir()
        text = f"cpu_cores_count 8\ngfx_target_version {version}\nvendor_id 4098\n"
        (nodes / str(number) / "properties").write_text(text)


@pytest.mark.parametrize(
    ("version", "chip"),
    [(90010, "gfx90a"), (90402, "gfx942"), (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201")],
)
def test_a_build_is_for_the_machines_chip(nodes: Path, version: int, chip: str) -> None:
    fill(nodes, CPU, version, version)
    target = resolve_target("hip")
    assert (target.device, target.cpu) == (f"hip:{chip}", chip)


@pytest.mark.parametrize("versions", [(100306, 110000), (110000, 100306)])
def test_an_apu_that_is_not_supported_is_left_out_beside_a_card(
    nodes: Path, versions: tuple[int, int]
) -> None:
    fill(nodes, CPU, *versions)
    assert resolve_target("hip").device == "hip:gfx1100"


def test_a_chip_that_is_not_supported_is_refused(nodes: Path) -> None:
    fill(nodes, CPU, 100300)
    with pytest.raises(BuildError, match=r"unknown AMD chip 'gfx1030'\. The chips to build for are"):
        resolve_target("hip")


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((), r"no AMD GPU in .*: give the chip to build for, as in --device hip:gfx942"),
        ((CPU,), "no AMD GPU in"),
        (
            (110501, 110000),
            "this machine has gfx1100 and gfx1151: give the chip to build for, as in --device",
        ),
        ((100306, 110501, 110000), "this machine has gfx1100 and gfx1151: .* as in --device hip:gfx1100$"),
        (
            (100306, 100300),
            "has gfx1030 and gfx1036, which are not supported: .* as in --device hip:gfx942$",
        ),
    ],
)
def test_without_a_single_chip_it_must_be_named(nodes: Path, versions: tuple[int, ...], reason: str) -> None:
    fill(nodes, *versions)
    with pytest.raises(BuildError, match=reason):
        resolve_target("hip")


def test_a_node_that_cannot_be_read_is_left_out(nodes: Path) -> None:
    fill(nodes, 90402)
    (nodes / "hidden" / "properties").mkdir(parents=True)
    assert resolve_target("hip").cpu == "gfx942"


@pytest.mark.parametrize(
    ("versions", "nvidia", "release", "device", "reason"),
    [
        ((), None, "3.9.0", "cpu", "no GPU was found"),
        ((CPU, 110501), "sm_90", "3.9.0", "hip:gfx1151", "listed in"),
        ((110000, 90402, 110000), None, "3.9.0", "hip:gfx1100,gfx942", "listed in"),
        ((100306, 110000), None, "3.9.0", "hip:gfx1100", "listed in"),  # an APU and a card
        ((100306,), None, "3.9.0", "cpu", "gfx1036 is not supported"),
        ((), "sm_90", "3.13.0", "cuda:sm_90", "as NVIDIA's driver says"),
        (
            (100306,),
            "sm_90",
            "3.9.0",
            "cpu",
            r"gfx1036 is not supported; IREE 3\.9 does not compile for sm_90",
        ),
        ((), "sm_90", None, "cuda:sm_90", "as NVIDIA's driver says"),  # the build says what is missing
    ],
)
def test_auto_is_the_gpus_of_the_machine_else_its_cpu(
    nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[int, ...],
    nvidia: str | None,
    release: str | None,
    device: str,
    reason: str,
) -> None:
    fill(nodes, *versions)
    monkeypatch.setattr(host_gpu, "nvidia_chip", lambda: nvidia)
    monkeypatch.setattr(host_gpu, "installed_version", lambda _: release)
    found, why = device_of_this_machine()
    assert found == device
    assert re.match(reason, why)


@pytest.mark.parametrize(
    ("gpu", "chip", "runs"),
    [
        (HostGpu("hip", "gfx1100"), "gfx1100", True),
        (HostGpu("hip", "gfx1100"), "gfx1101", False),
        (HostGpu("hip", None), "gfx1101", True),  # loading it says otherwise
        (HostGpu("cuda", "sm_90"), "sm_80", True),
        (HostGpu("cuda", "sm_90"), "sm_90a", True),
        (HostGpu("cuda", "sm_100"), "sm_90a", False),
        (HostGpu("cuda", "sm_90"), "sm_100", False),
    ],
)
def test_amd_gpus_run_their_own_code_and_nvidias_that_for_older_ones(
    gpu: HostGpu, chip: str, runs: bool
) -> None:
    assert gpu.runs(chip) is runs


class Cuda:
    """NVIDIA's driver with one GPU; `fails` names the function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def cuInit(self, flags: int) -> int:
        return int(self._fails == "cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return int(ordinal != 0)

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: object) -> int:
        out._obj.value = {75: 12, 76: 0}[attribute]
        return int(self._fails == "cuDeviceGetAttribute")


def test_nvidias_driver_tells_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(fails: str = "") -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda(fails))

    load()
    assert (nvidia_chip(), nvidia_chip(1)) == ("sm_120", None)
    for name in ("cuInit", "cuDeviceGetAttribute"):
        load(name)
        assert nvidia_chip() is None


def test_without_nvidias_driver_there_is_no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvidia_chip() is None
