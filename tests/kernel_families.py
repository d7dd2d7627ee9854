"""Records the families of hand-written CPU kernels that this test run executed, and those it only compiled.

A family is recognised by its instruction in the MLIR, so kernels of skipped tests are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

_INSTRUCTIONS = {
    "AMX bf16": "llvm.x86.tdpbf16ps",
    "AMX fp16": "llvm.x86.tdpfp16ps",
    "AMX int8": "llvm.x86.tdpbs",
    "AVX-512 bf16": "llvm.x86.avx512bf16.",
    "AVX-512 VNNI": "llvm.x86.avx512.vpdpbusd.512",
    "AVX-512 integers": "llvm.x86.avx512.pmaddubs.w.512",
    "AVX-VNNI": "llvm.x86.avx512.vpdpbusd.256",
    "AVX2 integers": "llvm.x86.avx2.pmadd.ub.sw",
    "NEON BFDOT": "llvm.aarch64.neon.bfdot",
    "NEON SDOT": "llvm.aarch64.neon.sdot",
    "NEON SMMLA": "llvm.aarch64.neon.smmla",
}
_KERNEL = "hal.executable.source"

_executed: set[str] = set()
_compiled: set[str] = set()


def families_of(text: str, architecture: str) -> set[str]:
    """The families of the kernels in a module's text: one a kernel, or several."""
    found = set()
    for kernel in text.split(_KERNEL)[1:]:
        special = {family for family, instruction in _INSTRUCTIONS.items() if instruction in kernel}
        found |= special or {f"vectors on {architecture}"}
    return found


def note_executed(text: str, architecture: str) -> None:
    """Records that the kernels of a module run in this process."""
    _executed.update(families_of(text, architecture))


def note_compiled(text: str, architecture: str) -> None:
    """Records that they were compiled, possibly for another CPU."""
    _compiled.update(families_of(text, architecture))


def noted() -> tuple[list[str], list[str]]:
    """What was executed and compiled in this process, for `add` in another."""
    return sorted(_executed), sorted(_compiled)


def add(noted_elsewhere: tuple[Iterable[str], Iterable[str]]) -> None:
    """Records what another process noted."""
    executed, compiled = noted_elsewhere
    _executed.update(executed)
    _compiled.update(compiled)


def summary() -> str | None:
    """One line about this run so far; None if there were no kernels."""
    return describe(_executed, _compiled)


def describe(executed: Iterable[str], compiled: Iterable[str]) -> str | None:
    ran, only_compiled = set(executed), set(compiled) - set(executed)
    if not ran | only_compiled:
        return None
    known = {*_INSTRUCTIONS} - ran - only_compiled
    parts = {"executed": ran, "only compiled": only_compiled, "not tried": known}
    return "kernels: " + "; ".join(
        f"{part} {', '.join(sorted(families))}" for part, families in parts.items() if families
    )
