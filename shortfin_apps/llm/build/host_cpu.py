"""What the CPU of this host can do, as far as a compiled model depends on it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# LLVM names a compiled model can fault on, and that Linux reports too; the rest tells nothing.
_DECISIVE = re.compile(r"avx(?!10).*|amx.*|fma|f16c|gfni|vaes|neon|dotprod|i8mm|bf16|sve2?|fullfp16")
_LINUX_NAMES = {"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp"}


def missing_features(needed: Iterable[str], cpuinfo: Path = CPUINFO) -> list[str]:
    """Those of `needed` (LLVM's names) that this host lacks; none where the host does not say."""
    host = _host_features(cpuinfo)
    if not host:
        return []
    decisive = (name for name in needed if _DECISIVE.fullmatch(name))
    return sorted(name for name in decisive if _plain(_LINUX_NAMES.get(name, name)) not in host)


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
