"""CPU features of this host that compiled models depend on, as reported by Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

CPUINFO = Path("/proc/cpuinfo")
# Workers that IREE starts at most, whatever it is asked for (IREE_TASK_EXECUTOR_MAX_WORKER_COUNT).
MAX_CPU_WORKERS = 64

# LLVM's names of features whose instructions LLVM selects by itself, so that a compiled model faults on a CPU
# without the feature. Features that Linux does not report are left out.
_DECISIVE = re.compile(
    r"avx(?!10).*|amx.*|fma4?|f16c|xop|tbm|gfni|vaes|s?sse3|sse4\.[12]|popcnt|lzcnt|bmi2?|movbe"
    r"|neon|fp-armv8|dotprod|i8mm|bf16|sve2?(p\d)?|fullfp16|complxnum|rdm|lse2?|rcpc|cssc|mops"
)
# Linux's names that differ: arch/x86/include/asm/cpufeatures.h, Documentation/arch/arm64/elf_hwcaps.rst.
_LINUX_NAMES = {
    "sse3": "pni",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "neon": "asimd",
    "fp-armv8": "fp",
    "dotprod": "asimddp",
    "fullfp16": "asimdhp",
    "complxnum": "fcma",
    "rdm": "asimdrdm",
    "lse": "atomics",
    "lse2": "uscat",
    "rcpc": "lrcpc",
}

_ARCHITECTURES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "arm_64", "arm64": "arm_64"}

# Linux, Documentation/arch/x86/xstate.rst: a process must request permission to use tile registers.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True, slots=True)
class HostCpu:
    """A CPU to run on: `architecture` is IREE's name, `features` are Linux's names.

    `architecture` is None if unknown. `features` is empty if the host does not report any; then no feature
    counts as missing.
    """

    architecture: str | None
    features: frozenset[str]
    kind: ClassVar[str] = "cpu"
    device: ClassVar[str] = "cpu"

    def is_of_another_architecture(self, architecture: str) -> bool:
        """Return whether this CPU cannot run programs for `architecture` (IREE's name); False if unknown."""
        known = architecture in _ARCHITECTURES.values() and self.architecture is not None
        return known and architecture != self.architecture

    def missing(self, needed: Iterable[str]) -> list[str]:
        """Return, sorted, the decisive features of `needed` (LLVM's names) that this CPU lacks."""
        if not self.features:
            return []
        return sorted(name for name in decisive_features(needed) if not self._has(name))

    def _has(self, name: str) -> bool:
        if name.startswith("amx") and not permit_amx():
            return False
        return _plain(_LINUX_NAMES.get(name, name)) in map(_plain, self.features)


def this_host(cpuinfo: Path = CPUINFO) -> HostCpu:
    """Return the CPU that this process runs on."""
    return HostCpu(_ARCHITECTURES.get(platform.machine()), _linux_features(cpuinfo))


def default_cpu_workers() -> int:
    """Return the number of CPU workers by default: one per CPU that this process may run on."""
    return min(len(os.sched_getaffinity(0)), MAX_CPU_WORKERS)


def decisive_features(features: Iterable[str]) -> frozenset[str]:
    """Return the `features` (LLVM's names) without which a compiled model faults."""
    return frozenset(name for name in features if _DECISIVE.fullmatch(name))


@cache
def permit_amx() -> bool:
    """Request permission, once, for all threads of this process to use AMX's tile registers.

    Returns False if the CPU or the kernel has no AMX, or if a sandbox denies the request. Without permission,
    the kernel kills a process that executes AMX code.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _linux_features(cpuinfo: Path) -> frozenset[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _plain(name: str) -> str:
    """Remove punctuation: LLVM has `avx512vnni` and `amx-tile`, Linux has `avx512_vnni` and `amx_tile`."""
    return re.sub(r"[._-]", "", name)
