"""What is read from a machine's /sys and /proc, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shortfin_apps.llm.tools.qualify.facts import chip_of, clocks, facts, obstacle

SERIAL = "GPU-deadbeef-1234"
FILES = {
    "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n',
    "proc/cmdline": "root=UUID=1234 amdgpu.gttsize=126976 ttm.pages_limit=32505856 quiet\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD RYZEN AI MAX+ 395\nmicrocode\t: 0xb70001e\n",
    "proc/meminfo": "MemTotal:       131000000 kB\nMemAvailable:   120000000 kB\nSlab: 1 kB\n",
    "opt/rocm/.info/version": "7.0.2-56\n",
    "sys/module/amdgpu/version": "6.14.14\n",
    "sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\nsimd_count 0\n",
    "sys/class/kfd/kfd/topology/nodes/1/properties": (
        "simd_count 80\nsimd_per_cu 2\ngfx_target_version 110501\nfw_version 31\nunique_id 987654321\n"
    ),
    "sys/class/drm/card0/device/vendor": "0x1002\n",
    "sys/class/drm/card0/device/device": "0x1586\n",
    "sys/class/drm/card0/device/vbios_version": "113-STRXLGEN-001\n",
    "sys/class/drm/card0/device/unique_id": f"{SERIAL}\n",
    "sys/class/drm/card0/device/mem_info_gtt_total": "133143986176\n",
    "sys/class/drm/card0/device/fw_version/mec_fw_version": "0x0000001e\n",
    "sys/class/drm/card0/device/pp_dpm_mclk": "0: 400Mhz\n1: 1000Mhz *\n",
    "sys/class/drm/card0/device/hwmon/hwmon3/temp1_input": "41000\n",
    "sys/class/drm/card0-DP-1/status": "connected\n",
    "sys/class/drm/card1/device/vendor": "0x10de\n",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  (someone@somewhere)\n"
    ),
    "proc/driver/nvidia/gpus/0000:01:00.0/information": (
        f"Model: \t\t NVIDIA H200\nGPU UUID: \t {SERIAL}\nVideo BIOS: \t 96.00.a5.00.01\n"
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_drivers_firmware_and_clocks_are_read(root: Path) -> None:
    found = facts("hip:gfx1151", root)
    assert found["chip"]["name"] == "gfx1151"
    assert found["system"]["distribution"] == "Debian GNU/Linux 13 (trixie)"
    assert found["system"]["kernel_options"] == ["amdgpu.gttsize=126976", "ttm.pages_limit=32505856"]
    assert found["cpu"]["model"] == "AMD RYZEN AI MAX+ 395"
    assert found["memory"] == {"MemTotal_kib": 131000000, "MemAvailable_kib": 120000000}
    amd = found["amd"]
    assert (amd["driver"], amd["rocm"]) == ("6.14.14", "7.0.2-56")
    assert amd["nodes"] == [
        {"simd_count": 80, "simd_per_cu": 2, "gfx_target_version": 110501, "fw_version": 31}
    ]
    [card] = amd["cards"]
    assert card["firmware"] == {"mec_fw_version": "0x0000001e"}
    assert card["vbios_version"] == "113-STRXLGEN-001"
    assert amd["clocks"] == {"card0 pp_dpm_mclk": "0: 400Mhz, 1: 1000Mhz *", "card0 temp1_input": "41000"}
    assert found["nvidia"] == {
        "driver": "580.95.05",
        "gpus": [{"Model": "NVIDIA H200", "Video BIOS": "96.00.a5.00.01"}],
    }


def test_serial_numbers_and_the_disks_name_are_left_out(root: Path) -> None:
    text = json.dumps(facts("hip:gfx1151", root))
    for private in (SERIAL, "987654321", "UUID=1234", "someone"):
        assert private not in text


def test_a_machine_without_gpus_has_facts(tmp_path: Path) -> None:
    found = facts("cpu", tmp_path)
    assert found["chip"] is None
    assert found["amd"]["cards"] == found["nvidia"]["gpus"] == []
    assert clocks(tmp_path) == {}


@pytest.mark.parametrize(
    ("device", "name"), [("hip:gfx942", "gfx942"), ("hip", None), ("hip:gfx9999", None), ("cpu:znver4", None)]
)
def test_only_known_amd_chips_have_a_row(device: str, name: str | None) -> None:
    chip = chip_of(device)
    assert (None if chip is None else chip.name) == name


def test_a_closed_device_is_told_with_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle("hip:gfx1151", root) is None  # the kernel has no /dev/kfd
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    assert obstacle("hip:gfx1151", root) is None
    monkeypatch.setattr("os.access", lambda path, mode: False)
    reason = obstacle("hip:gfx1151", root)
    assert reason is not None
    assert "/dev/kfd" in reason
    assert "`render`" in reason
    assert obstacle("cpu", root) is None
