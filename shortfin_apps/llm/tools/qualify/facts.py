"""Facts about the machine that explain a result, read from Linux without tools of ROCm or CUDA.

Sources: amdkfd's topology and amdgpu's files in /sys (kernel documentation, "AMDGPU driver"), and the files
of NVIDIA's driver in /proc. Serial numbers, UUIDs and addresses are left out.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shortfin_apps.llm import __version__
from shortfin_apps.llm.components.runtime.device import GPU_NAMES
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS, Chip
from shortfin_apps.llm.contract.iree_release import installed_version

ROOT = Path("/")
LIBRARIES = ("iree-base-runtime", "iree-base-compiler", "shortfin", "triton", "numpy")
# Files of a card's folder `device`, and options of kernel modules that change what a GPU can do.
_CARD_FILES = (
    *(
        "vbios_version",
        "mem_info_vram_total",
        "mem_info_vram_used",
        "mem_info_gtt_total",
        "mem_info_gtt_used",
    ),
    *("current_link_speed", "current_link_width", "power_dpm_force_performance_level", "gpu_busy_percent"),
    *("current_compute_partition", "current_memory_partition"),
)
_SENSOR = re.compile(r"temp\d_input|power1_average|power1_input|freq\d_input")
_CLOCK_FILES = ("pp_dpm_sclk", "pp_dpm_mclk", "pp_dpm_fclk")
_NODE_FIELDS = (
    *("gfx_target_version", "simd_count", "simd_per_cu", "max_engine_clk_fcompute", "device_id"),
    *("fw_version", "sdma_fw_version", "local_mem_size", "num_xcc", "lds_size_in_kb", "wave_front_size"),
)
_KERNEL_OPTIONS = re.compile(r"^(amdgpu|amd_iommu|iommu|ttm|amdttm|pci|nvidia|transparent_hugepage|mem)\b")


def facts(device: str, root: Path = ROOT) -> dict[str, Any]:
    """Return everything known about this machine and `device` (as `build` names it), as JSON values."""
    chip = chip_of(device)
    return {
        "device": device,
        "chip": None if chip is None else asdict(chip),
        "versions": {"shortfin-llm": __version__, "python": platform.python_version()}
        | {name: version for name in LIBRARIES if (version := installed_version(name)) is not None},
        "system": _system(root),
        "cpu": _cpu(root),
        "memory": _memory(root),
        "amd": _amd(root),
        "nvidia": _nvidia(root),
    }


def chip_of(device: str) -> Chip | None:
    """Return the row of the table of AMD chips for a device such as `hip:gfx942`; None without one."""
    kind, _, name = device.partition(":")
    return CHIPS.get(name) if GPU_NAMES.get(kind) == "hip" else None


def clocks(root: Path = ROOT) -> dict[str, str]:
    """Return the clocks, temperatures and power of AMD GPUs at this moment, by card and file.

    Of a clock's levels, the one in use has an asterisk.
    """
    found = {}
    for card in _cards(root):
        for name in _CLOCK_FILES:
            if (text := _read(card / "device" / name)) is not None:
                found[f"{card.name} {name}"] = ", ".join(text.splitlines())
        for sensor in sorted((card / "device" / "hwmon").glob("hwmon*/*_*")):
            if _SENSOR.fullmatch(sensor.name) and (text := _read(sensor)) is not None:
                found[f"{card.name} {sensor.name}"] = text
    return found


def obstacle(device: str, root: Path = ROOT) -> str | None:
    """Return what keeps this user from the AMD GPU, if the kernel has one; None if nothing is known to."""
    kfd = root / "dev/kfd"
    if GPU_NAMES.get(device.partition(":")[0]) != "hip" or not kfd.exists():
        return None
    nodes = [kfd, *sorted((root / "dev/dri").glob("renderD*"))]
    closed = [str(node.relative_to(root)) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if not closed:
        return None
    return (
        f"this user may not open /{closed[0]}: add it to the groups `render` and `video`, or give the "
        "container `--device /dev/kfd --device /dev/dri`"
    )


def _system(root: Path) -> dict[str, Any]:
    release = _read(root / "etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    words = (_read(root / "proc/cmdline") or "").split()
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "distribution": None if name is None else name[1],
        "kernel_options": [word for word in words if _KERNEL_OPTIONS.match(word)],
        "in_container": any((root / name).exists() for name in (".dockerenv", "run/.containerenv")),
    }


def _cpu(root: Path) -> dict[str, Any]:
    text = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    microcode = re.search(r"^microcode\s*: (.*)$", text, re.MULTILINE)
    return {
        "model": platform.machine() if model is None else model[1],
        "microcode": None if microcode is None else microcode[1],
        "cpus": len(os.sched_getaffinity(0)),
    }


def _memory(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (_read(root / "proc/meminfo") or "").splitlines())
    names = ("MemTotal:", "MemAvailable:", "SwapTotal:", "HugePages_Total:")
    return {words[0].rstrip(":") + "_kib": int(words[1]) for words in lines if words[0] in names}


def _amd(root: Path) -> dict[str, Any]:
    """Return driver, ROCm's version if it is installed, and each card and node of the kernel."""
    rocm = next((text for path in _rocm_files(root) if (text := _read(path)) is not None), None)
    nodes = [_node(path) for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"))]
    return {
        "driver": _read(root / "sys/module/amdgpu/version"),
        "rocm": rocm,
        "library_path_is_set": os.environ.get("IREE_HIP_DYLIB_PATH") is not None,
        "nodes": [node for node in nodes if node.get("gfx_target_version", 0)],
        "cards": [_card(card) for card in _cards(root)],
        "clocks": clocks(root),
    }


def _rocm_files(root: Path) -> Iterator[Path]:
    yield root / "opt/rocm/.info/version"
    yield from sorted((root / "opt").glob("rocm-*/.info/version"), reverse=True)


def _node(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read(path / "properties") or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in _NODE_FIELDS}


def _cards(root: Path) -> list[Path]:
    """Return the folders of AMD's cards, without connectors (`card0-DP-1`)."""
    cards = sorted((root / "sys/class/drm").glob("card[0-9]*"))
    return [card for card in cards if "-" not in card.name and _read(card / "device/vendor") == "0x1002"]


def _card(card: Path) -> dict[str, Any]:
    device = card / "device"
    firmware = {file.name: _read(file) for file in sorted((device / "fw_version").glob("*"))}
    values = {name: text for name in _CARD_FILES if (text := _read(device / name)) is not None}
    return {"card": card.name, "device": _read(device / "device"), "firmware": firmware, **values}


def _nvidia(root: Path) -> dict[str, Any]:
    version = (_read(root / "proc/driver/nvidia/version") or "").splitlines()
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  DATE": who built it is not of interest.
    found = re.search(r"\d+\.\d[\d.]*", version[0]) if version else None
    gpus = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        pairs = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", _read(path) or "", re.MULTILINE))
        gpus.append({name: pairs[name] for name in ("Model", "Video BIOS", "GPU Firmware") if name in pairs})
    return {"driver": None if found is None else found[0], "gpus": gpus}


def _read(path: Path) -> str | None:
    """Return a file's text without white space around it; None if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
