"""What the CPU of this host can do, as far as a compiled model depends on it."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# LLVM names a compiled model can fault on, and that Linux reports too; the rest tells nothing.
_DECISIVE = re.compile(r"avx(?!10).*|amx.*|fma|f16c|gfni|vaes|neon|dotprod|i8mm|bf16|sve2?|fullfp16")
_LINUX_NAMES = {"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp"}

_ARCHITECTURES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "arm_64", "arm64": "arm_64"}

# Linux, Documentation/arch/x86/xstate.rst: a process asks before its threads may use tile registers.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def is_of_another_architecture(architecture: str) -> bool:
    """Whether a program for that one (IREE's name) cannot run here; False where either is not known."""
    here = _ARCHITECTURES.get(platform.machine())
    return architecture in _ARCHITECTURES.values() and here is not None and architecture != here


@cache
def permit_amx() -> bool:
    """Asks the kernel, once, to let every thread of this process use AMX's tile registers.

    False where the CPU or the kernel has none, or a sandbox forbids it: AMX code would then be killed.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def missing_features(needed: Iterable[str], cpuinfo: Path = CPUINFO) -> list[str]:
    """Those of `needed` (LLVM's names) that this host lacks; none where the host does not say."""
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
