"""Finds the AMD GPUs of this machine, to build for them: in the kernel's list, without ROCm's tools.

Source: the Linux driver amdkfd, which lists CPUs and GPUs as nodes. A GPU's `gfx_target_version` is its
version of LLVM's target as decimal digits: 90010 is gfx90a, and 110501 is gfx1151.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shortfin_apps.llm.contract.errors import BuildError

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)


def amd_chip() -> str:
    """Return the chip of this machine's AMD GPUs. Raises BuildError if there are none, or several chips."""
    chips = amd_chips()
    if len(chips) == 1:
        return chips[0]
    found = f"this machine has {' and '.join(chips)}" if chips else f"no AMD GPU in {NODES}"
    raise BuildError(f"{found}: give the chip to build for, as in --device hip:{(chips or ['gfx942'])[0]}")


def amd_chips() -> list[str]:
    """Return the chips of this machine's AMD GPUs, without duplicates."""
    return sorted(set(_chips()))


def _chips() -> Iterator[str]:
    for path in NODES.glob("*/properties"):
        try:
            version = _VERSION.search(path.read_text())
        except OSError:  # a container may hide the GPUs that it does not have
            continue
        if version and (number := int(version[1])):  # 0: a CPU
            yield f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
