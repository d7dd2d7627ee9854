"""Opens AMD GPUs through shortfin's HIP driver.

Upstream and shortfin call this device `amdgpu`. Here it is `hip`, as everywhere else in IREE, where `amdgpu`
is a different driver that uses HSA directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shortfin as sf

from shortfin_apps.llm.components.runtime.free_memory import spare_hip_bytes
from shortfin_apps.llm.components.runtime.gpu_choice import select, unavailable, unopenable
from shortfin_apps.llm.components.runtime.shortfin_device import ShortfinDevice
from shortfin_apps.llm.contract.errors import ArtifactError


def open_hip(device_ids: Sequence[str] = ()) -> ShortfinDevice:
    """Opens AMD GPUs by index or by the driver's name, one per pipeline stage; by default the first.

    Raises ArtifactError.
    """
    if not sf.amdgpu.is_available():
        raise ArtifactError("this shortfin was built without AMD GPU support; install shortfin 3.9 from PyPI")
    # Without a prefix, shortfin's environment variables have no effect. For asynchronous allocations, the
    # driver would create memory pools that it never uses.
    builder = sf.amdgpu.SystemBuilder(
        env_prefix=None, amdgpu_async_allocations=False, amdgpu_async_caching=True
    )
    available = _available(builder)
    builder.visible_devices = chosen = select("hip", device_ids or ("0",), available)
    try:
        system = builder.create_system()
    except Exception as error:
        raise unopenable("hip", error) from None
    ordinals = [available.index(name) for name in chosen]
    return ShortfinDevice("hip", system, lambda stage: spare_hip_bytes(ordinals[stage]), unified=False)


def _available(builder: Any) -> list[str]:
    """Returns the driver's names of all GPUs; at least one."""
    try:
        return list(builder.available_devices)
    except Exception as error:
        raise unavailable("hip", error) from None
