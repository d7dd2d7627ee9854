"""Values of `--device`, as used by the settings and the runtimes."""

from __future__ import annotations

from typing import Literal

GpuDriver = Literal["hip", "cuda"]

CPU_NAMES = ("cpu", "local-task", "hostcpu")  # the host CPU
GPU_NAMES: dict[str, GpuDriver] = {"hip": "hip", "amdgpu": "hip", "cuda": "cuda"}  # AMD's and NVIDIA's
