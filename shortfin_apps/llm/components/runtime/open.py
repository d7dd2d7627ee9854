"""Opens a device on one of two runtimes: iree.runtime, or shortfin if that is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Literal

from shortfin_apps.llm.components.runtime.device import CPU_NAMES, GPU_NAMES, Device, GpuDriver
from shortfin_apps.llm.components.runtime.gpu_chip import gpu_chip
from shortfin_apps.llm.components.runtime.gpu_choice import select
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import HostCpu, permit_amx, this_host
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.contract.iree_release import runtime_release, shortfin_release

logger = logging.getLogger(__name__)

Runtime = Literal["auto", "shortfin", "iree"]


def open_device(
    device: str = "cpu",
    runtime: Runtime = "auto",
    *,
    threads: int | None = None,
    device_ids: Sequence[str] = (),
) -> Device:
    """Open `device`: "cpu" (also "local-task", "hostcpu"), AMD GPUs as "hip" (also "amdgpu"), or "cuda".

    `threads` is the number of CPU workers (default: one per CPU that this process may run on). It only
    affects iree: shortfin always has one worker per physical core. `device_ids` selects GPUs by index or by
    the driver's name, one per pipeline stage.

    The runtime `auto` is shortfin on AMD GPUs, and iree on NVIDIA GPUs and the CPU. iree is faster on the
    CPU: with the same VMFBs, on one core with two hardware threads, a round trip of a tiny entry takes 14 us
    on iree and 41 us on shortfin; a decode step of a 135M model at batch size 8 takes 63 ms on iree's two
    workers and 108 ms on shortfin's one. If shortfin is not installed, iree is used, with a warning if
    `runtime` is shortfin. Raises ArtifactError.
    """
    if device in CPU_NAMES:
        return _open_cpu(runtime, threads)
    if driver := GPU_NAMES.get(device):
        if device == "amdgpu":
            logger.info("`amdgpu` means `hip` here, as in shortfin; elsewhere in IREE it is another driver")
        return _open_gpu(driver, runtime, device_ids)
    check_no_list(device)
    known = ", ".join(sorted((*CPU_NAMES, *GPU_NAMES)))
    raise ArtifactError(f"there is no device {device!r}; choose one of {known}")


def check_no_list(device: str) -> None:
    """Raise ArtifactError for a list of devices, which only builds take."""
    if "," in device:
        raise ArtifactError(
            f"--device {device}: a list of devices is for sources that are built; to run an artefact, name "
            "one kind, as in `--device cpu`, or leave the choice to `--device auto`"
        )


def is_gpu(device: str) -> bool:
    """Return whether `device` is a GPU type, with or without a chip or index, as in `hip:gfx942`."""
    return device.partition(":")[0] in GPU_NAMES


def check_gpu(device: str) -> None:
    """Raise ArtifactError if `device` is a GPU type that this host does not have. Opens no device."""
    if driver := GPU_NAMES.get(device):
        from shortfin_apps.llm.components.runtime.iree_gpu import available_gpus

        available_gpus(driver)


def host_of(device: str, device_ids: Sequence[str] = ()) -> HostCpu | HostGpu:
    """Return the CPU or GPU that `open_device` opens first, with its chip. Opens no device.

    A chip in `device`, as in `hip:gfx942`, is believed without asking the driver. Raises ArtifactError if
    there is no such GPU.
    """
    kind, _, chip = device.partition(":")
    driver = GPU_NAMES.get(kind)
    if driver is None:
        return this_host()
    if chip:
        return HostGpu(driver, chip)
    from shortfin_apps.llm.components.runtime.iree_gpu import available_gpus

    available = available_gpus(driver)
    ordinal = available.index(select(driver, device_ids or ("0",), available)[0])
    return HostGpu(driver, gpu_chip(driver, ordinal), ordinal)


def hosts_at_hand(kind: str) -> list[HostCpu | HostGpu]:
    """Return this machine's CPU, or its GPUs of this kind; none if the driver finds none. Opens no device."""
    if kind not in GPU_NAMES:
        return [this_host()]
    from shortfin_apps.llm.components.runtime.iree_gpu import available_gpus

    driver = GPU_NAMES[kind]
    try:
        count = len(available_gpus(driver))
    except ArtifactError:
        return []
    return [HostGpu(driver, gpu_chip(driver, ordinal), ordinal) for ordinal in range(count)]


def has_shortfin() -> bool:
    return importlib.util.find_spec("_shortfin") is not None


def _open_cpu(runtime: Runtime, threads: int | None) -> Device:
    permit_amx()  # whether a program needs AMX was decided when the artefact was opened
    if runtime == "shortfin" and _finds_shortfin():
        _check_shortfin()
        from shortfin_apps.llm.components.runtime.shortfin_device import open_hostcpu

        return open_hostcpu()
    from shortfin_apps.llm.components.runtime.iree_local import open_local_task

    return open_local_task(threads)


def _open_gpu(driver: GpuDriver, runtime: Runtime, device_ids: Sequence[str]) -> Device:
    if driver == "cuda" and runtime == "shortfin":
        raise ArtifactError("shortfin knows no NVIDIA GPUs; leave `--runtime` at auto")
    if driver == "hip" and (
        _finds_shortfin() if runtime == "shortfin" else runtime == "auto" and has_shortfin()
    ):
        _check_shortfin()
        from shortfin_apps.llm.components.runtime.shortfin_device import open_hip

        return open_hip(device_ids)
    from shortfin_apps.llm.components.runtime.iree_gpu import open_gpu

    return open_gpu(driver, device_ids)


def _finds_shortfin() -> bool:
    """Return whether shortfin, which the user requested, is installed; log a warning if not."""
    if not has_shortfin():
        logger.warning(
            "shortfin is not installed: the model runs on the IREE runtime, as with `--runtime iree`"
        )
    return has_shortfin()


def _check_shortfin() -> None:
    """Raise ArtifactError if shortfin cannot load the VMFBs of the installed IREE release."""
    shortfin, iree = shortfin_release(), runtime_release()
    if shortfin != iree:
        raise ArtifactError(
            f"shortfin {shortfin} cannot load what IREE {iree} compiles; run `pip install "
            f"'iree-base-compiler=={shortfin}.*' 'iree-base-runtime=={shortfin}.*'`, or use `--runtime iree`"
        )
