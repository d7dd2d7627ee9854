"""Features of this host's CPU, as far as compiled models depend on them."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# LLVM's names of features whose absence makes a compiled model fault, and that Linux reports.
_DECISIVE = re.compile(r"avx(?!10).*|amx.*|fma|f16c|gfni|vaes|neon|dotprod|i8mm|bf16|sve2?|fullfp16")
_LINUX_NAMES = {"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp"}

_ARCHITECTURES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "arm_64", "arm64": "arm_64"}

# Linux, Documentation/arch/x86/xstate.rst: a process must request permission to use tile registers.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def is_of_another_architecture(architecture: str) -> bool:
    """Whether a program for that architecture (IREE's name) cannot run here; False if either is unknown."""
    here = _ARCHITECTURES.get(platform.machine())
    return architecture in _ARCHITECTURES.values() and here is not None and architecture != here


@cache
def permit_amx() -> bool:
    """Requests permission from the kernel, once, for all threads of this process to use AMX's tile registers.

    False if the CPU or the kernel has no AMX, or a sandbox forbids it: AMX code would then be killed.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def missing_features(needed: Iterable[str], cpuinfo: Path = CPUINFO) -> list[str]:
    """The features of `needed` (LLVM's names) that this host lacks; none if the host does not tell."""
    host = _host_features(cpuinfo)
    if not host:
        return []
    decisive = (name for name in needed if _DECISIVE.fullmatch(name))
    return sorted(name for name in decisive if not _has(host, name))


def _has(host: frozenset[str], name: str) -> bool:
    if name.startswith("amx") and not permit_amx():
        return False
    return _plain(_LINUX_NAMES.get(name, name)) in host


def _host_features(cpuinfo: Path) -> frozenset[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(_plain(name) for name in found[1].split()) if found else frozenset()


def _plain(name: str) -> str:
    """LLVM writes `avx512vnni` and `amx-tile`, Linux `avx512_vnni` and `amx_tile`."""
    return re.sub(r"[._-]", "", name)
