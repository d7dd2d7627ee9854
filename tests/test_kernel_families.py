from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.kernels import render
from shortfin_apps.llm.builder.kernels.cpu.top_k import TopKGeometry
from tests.kernel_families import describe, families_of

ROOT = Path(__file__).parents[1]
TOP_K = render("cpu/top_k", "top_k", g=TopKGeometry(size=64, k=4))


@pytest.mark.parametrize(
    ("instruction", "family"),
    [
        ("llvm.x86.tdpbf16ps", "AMX bf16"),
        ("llvm.x86.tdpfp16ps", "AMX fp16"),
        ("llvm.x86.tdpbssd", "AMX int8"),
        ("llvm.x86.tdpbsud", "AMX int8"),
        ("llvm.x86.avx512bf16.dpbf16ps.512", "AVX-512 bf16"),
        ("llvm.x86.avx512.vpdpbusd.512", "AVX-512 VNNI"),
        ("llvm.x86.avx512.pmaddubs.w.512", "AVX-512 integers"),
        ("llvm.x86.avx512.vpdpbusd.256", "AVX-VNNI"),
        ("llvm.x86.avx2.pmadd.ub.sw", "AVX2 integers"),
        ("llvm.aarch64.neon.sdot.v4i32.v16i8", "NEON SDOT"),
        ("llvm.aarch64.neon.smmla", "NEON SMMLA"),
    ],
)
def test_a_family_is_told_by_its_instruction(instruction: str, family: str) -> None:
    templates = (ROOT / "shortfin_apps/llm/builder/kernels").rglob("*.j2")
    assert any(instruction in template.read_text() for template in templates)
    text = f'module {{ {TOP_K} hal.executable.source {{ "{instruction}" }} }}'
    assert families_of(text, "x86_64") == {family, "vectors on x86_64"}


def test_a_module_without_kernels_has_no_family() -> None:
    assert families_of("module { func.func @f() { return } }", "x86_64") == set()


def test_executed_kernels_are_not_listed_as_only_compiled() -> None:
    line = describe({"AVX-512 bf16", "vectors on x86_64"}, {"AVX-512 bf16", "AMX bf16", "AMX int8"})
    assert line == (
        "kernels: executed AVX-512 bf16, vectors on x86_64; only compiled AMX bf16, AMX int8; "
        "not tried AMX fp16, AVX-512 VNNI, AVX-512 integers, AVX-VNNI, AVX2 integers, NEON BFDOT, NEON SDOT, "
        "NEON SMMLA"
    )
    assert describe([], []) is None


@pytest.mark.slow
def test_the_line_before_the_summary_lists_the_families() -> None:
    arguments = ["-p", "no:cacheprovider", "tests/builder/lowering/cpu/test_top_k.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    *_, line, summary = run.stdout.strip().splitlines()
    assert line.startswith("kernels: executed vectors on ")
    assert " passed" in summary
