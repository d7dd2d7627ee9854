"""The GPUs of this machine: AMD's from the kernel's list, without ROCm's tools; NVIDIA's from their driver.

Sources: the Linux driver amdkfd, which lists CPUs and GPUs as nodes. A GPU's `gfx_target_version` is its
version of LLVM's target as decimal digits: 90010 is gfx90a, and 110501 is gfx1151. `cuDeviceGetAttribute` of
NVIDIA's cuda.h, for the compute capability.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.contract.device_names import CPU, join_devices
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, Release, installed_version

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AUTO = "auto"
_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A GPU to run on: `kind` is "hip" or "cuda", `ordinal` the driver's number; `chip` None if unknown."""

    kind: str
    chip: str | None
    ordinal: int = 0

    @property
    def device(self) -> str:
        """The GPU as in `--device`, with the chip if that is known."""
        return self.kind if self.chip is None else f"{self.kind}:{self.chip}"

    @property
    def is_supported(self) -> bool:
        """Whether the chip is known and models can be built for it."""
        return self.chip is not None and (self.kind != "hip" or self.chip in CHIPS)

    def runs(self, chip: str) -> bool:
        """Return whether this GPU runs code for `chip`: AMD's only its own, NVIDIA's (PTX) all older ones."""
        if self.chip is None or self.chip == chip:
            return True
        if self.kind == "hip":
            return False
        if chip.endswith("a"):  # PTX for one chip alone
            return chip.removesuffix("a") == self.chip
        return sm_number(chip) <= sm_number(self.chip)


def sm_number(chip: str) -> int:
    """Return the number of an NVIDIA chip: 90 for "sm_90a"."""
    return int(chip.removeprefix("sm_").removesuffix("a"))


def amd_chip() -> str:
    """Return the chip of this machine's AMD GPUs. Raises BuildError if there are none, or several chips.

    Chips that models cannot be built for, as those of many APUs, count only if there are no others.
    """
    found = amd_chips()
    known = [chip for chip in found if chip in CHIPS]
    chips = known or found
    if len(chips) == 1:
        return chips[0]
    here = f"this machine has {' and '.join(chips)}" if chips else f"no AMD GPU in {NODES}"
    if chips and not known:
        here += ", which are not supported"
    raise BuildError(f"{here}: give the chip to build for, as in --device hip:{(known or ['gfx942'])[0]}")


def amd_chips() -> list[str]:
    """Return the chips of this machine's AMD GPUs, each once."""
    return sorted(set(_chips()))


def nvidia_chip(ordinal: int = 0) -> str | None:
    """Return the chip of an NVIDIA GPU as in "sm_90"; None if there is no driver or no such GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, numbers = ctypes.c_int(), [ctypes.c_int() for _ in _CAPABILITY]
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    for number, attribute in zip(numbers, _CAPABILITY, strict=True):
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return f"sm_{''.join(str(number.value) for number in numbers)}"


def device_of_this_machine() -> tuple[str, str]:
    """Return the `--device` that `auto` stands for, this machine's GPUs or else its CPU, and the reason."""
    amd = amd_chips()
    if known := [chip for chip in amd if chip in CHIPS]:
        return join_devices(f"hip:{chip}" for chip in known), f"listed in {NODES}"
    reasons = [f"{chip} is not supported" for chip in amd]
    if chip := nvidia_chip():
        compiler = installed_version("iree-base-compiler")  # without one, the build says so
        if compiler is None or Release.parse(compiler) != OF_SHORTFIN:
            return f"cuda:{chip}", "as NVIDIA's driver says"
        reasons.append(f"IREE {OF_SHORTFIN} does not compile for {chip} (docs/iree_releases.md)")
    return CPU, "; ".join(reasons) or "no GPU was found"


def _chips() -> Iterator[str]:
    for path in NODES.glob("*/properties"):
        try:
            version = _VERSION.search(path.read_text())
        except OSError:  # a container may hide the GPUs that it does not have
            continue
        if version and (number := int(version[1])):  # 0: a CPU
            yield f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
