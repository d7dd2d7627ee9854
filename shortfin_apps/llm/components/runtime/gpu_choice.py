"""Selects GPUs by index or by the driver's name, and builds the errors for unavailable GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shortfin_apps.llm.components.runtime.device import GpuDriver
from shortfin_apps.llm.contract.errors import ArtifactError


class _Kind(NamedTuple):
    maker: str
    library: str
    how_to_install: str
    check: str  # command that lists GPUs
    visible: str  # environment variable that hides GPUs


_KINDS: dict[GpuDriver, _Kind] = {
    "hip": _Kind(
        maker="AMD",
        library="the HIP runtime (libamdhip64.so)",
        how_to_install="install ROCm, point IREE_HIP_DYLIB_PATH at its folder",
        check="rocminfo",
        visible="HIP_VISIBLE_DEVICES",
    ),
    "cuda": _Kind(
        maker="NVIDIA",
        library="the CUDA driver (libcuda.so)",
        how_to_install="install NVIDIA's driver",
        check="nvidia-smi",
        visible="CUDA_VISIBLE_DEVICES",
    ),
}


def select(driver: GpuDriver, device_ids: Sequence[str], available: Sequence[str]) -> list[str]:
    """Return the driver's names of the selected GPUs, in order. Raises ArtifactError."""
    kind = _KINDS[driver]
    chosen = [_find(kind, device_id, available) for device_id in device_ids]
    name, uses = Counter(chosen).most_common(1)[0]
    if uses > 1:
        raise ArtifactError(f"--device-ids names the GPU {name} twice; each pipeline stage needs its own")
    for name in chosen:
        if available.count(name) > 1:
            raise ArtifactError(
                f"{available.count(name)} GPUs have the name {name}, so none of them can be chosen; "
                f"leave one of them visible with {kind.visible}"
            )
    return chosen


def unavailable(driver: GpuDriver, error: Exception | None = None) -> ArtifactError:
    """Return the error for a driver that lists no GPUs (`error` None), or fails to list any with `error`."""
    kind, text = _KINDS[driver], str(error or "")
    if "dynamic library search path" in text or "libamdhip64" in text:
        return ArtifactError(
            f"{kind.library} was not found; {kind.how_to_install}, or serve a model that was built with "
            "`--device cpu`"
        )
    # If there is no GPU, a driver reports an error or a count of 0; IREE may then fail to allocate an empty
    # list of names.
    if error is None or any(sign in text for sign in _NO_DEVICE):
        return ArtifactError(
            f"no {kind.maker} GPU was found; check `{kind.check}`, or serve a model that was built with "
            "`--device cpu`"
        )
    return ArtifactError(
        f"the {kind.maker} GPU driver cannot be used ({_first_line(error)}); check `{kind.check}`, or use "
        "`--device cpu`"
    )


def unopenable(driver: GpuDriver, error: Exception) -> ArtifactError:
    """Return the error for a GPU that the driver lists but cannot open."""
    return ArtifactError(f"the {_KINDS[driver].maker} GPU cannot be opened ({_first_line(error)})")


_NO_DEVICE = ("hipErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "allocations must be >0")


def _find(kind: _Kind, device_id: str, available: Sequence[str]) -> str:
    if device_id in available:
        return device_id
    if device_id.isdecimal() and int(device_id) < len(available):
        return available[int(device_id)]
    known = ", ".join(f"{index} ({name})" for index, name in enumerate(available))
    raise ArtifactError(f"there is no {kind.maker} GPU {device_id!r}; available are {known}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
