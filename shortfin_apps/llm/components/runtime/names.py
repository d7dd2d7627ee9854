"""Values of `--device`, the settings' and the runtimes' common vocabulary."""

from __future__ import annotations

from typing import Literal

GpuDriver = Literal["hip", "cuda"]

CPU_NAMES = ("cpu", "local-task", "hostcpu")  # the host CPU
GPU_NAMES = ("hip", "amdgpu")  # AMD GPUs
