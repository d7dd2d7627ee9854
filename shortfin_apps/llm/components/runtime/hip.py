"""Opens AMD GPUs through shortfin's HIP driver.

Upstream and shortfin call this device `amdgpu`; it is named `hip` here, as everywhere else in IREE, where
`amdgpu` is another driver, straight on HSA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import shortfin as sf

from shortfin_apps.llm.components.runtime.shortfin_device import ShortfinDevice
from shortfin_apps.llm.errors import ArtifactError

_NO_GPU = "no AMD GPU was found; check `rocminfo`, or serve a model that was built with `--device cpu`"
_NO_LIBRARY = (
    "the HIP runtime (libamdhip64.so) was not found; install ROCm, point IREE_HIP_DYLIB_PATH at its folder, "
    "or serve a model that was built with `--device cpu`"
)


def open_hip(device_ids: Sequence[str] = ()) -> ShortfinDevice:
    """AMD GPUs by index or by the driver's name, one per pipeline stage; by default the first.

    Raises ArtifactError.
    """
    if not sf.amdgpu.is_available():
        raise ArtifactError("this shortfin was built without AMD GPU support; install shortfin 3.9 from PyPI")
    # Without a prefix, shortfin's variables cannot change what is opened. The driver would make memory pools
    # for asynchronous allocations, but never uses them.
    builder = sf.amdgpu.SystemBuilder(
        env_prefix=None, amdgpu_async_allocations=False, amdgpu_async_caching=True
    )
    builder.visible_devices = select(device_ids or ("0",), _available(builder))
    try:
        system = builder.create_system()
    except Exception as error:
        raise ArtifactError(f"the AMD GPU cannot be opened ({_first_line(error)})") from None
    return ShortfinDevice("hip", system, unified=False)


def select(device_ids: Sequence[str], available: Sequence[str]) -> list[str]:
    """The driver's names of the chosen GPUs, in order. Raises ArtifactError."""
    chosen = [_find(device_id, available) for device_id in device_ids]
    name, uses = Counter(chosen).most_common(1)[0]
    if uses > 1:
        raise ArtifactError(f"--device-ids names the GPU {name} twice; each pipeline stage needs its own")
    for name in chosen:
        if available.count(name) > 1:
            raise ArtifactError(
                f"{available.count(name)} GPUs have the name {name}, so none of them can be chosen; "
                "leave one of them visible with HIP_VISIBLE_DEVICES"
            )
    return chosen


def _available(builder: Any) -> list[str]:
    """The driver's names of all GPUs; at least one."""
    try:
        return list(builder.available_devices)
    except Exception as error:
        text = str(error)
        if "libamdhip64" in text:
            raise ArtifactError(_NO_LIBRARY) from None
        # Without a device, HIP reports an error or a count of 0; the driver then fails to allocate no names.
        if "hipErrorNoDevice" in text or "allocations must be >0" in text:
            raise ArtifactError(_NO_GPU) from None
        raise ArtifactError(
            f"the AMD GPU driver cannot be used ({_first_line(error)}); check `rocminfo`, or use "
            "`--device cpu`"
        ) from None


def _find(device_id: str, available: Sequence[str]) -> str:
    if device_id in available:
        return device_id
    if device_id.isdecimal() and int(device_id) < len(available):
        return available[int(device_id)]
    known = ", ".join(f"{index} ({name})" for index, name in enumerate(available))
    raise ArtifactError(f"there is no AMD GPU {device_id!r}; available are {known}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
