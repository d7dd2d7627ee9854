from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time import llvm_ir
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import compile_kernel

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.ahead_of_time.test_executable import KERNEL


@pytest.fixture
def edits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are compiled, not read from a cache."""
    made: list[str] = []
    edit = llvm_ir.for_iree

    def noted(ir: str, name: str, *rest: Any) -> str:
        made.append(name)
        return edit(ir, name, *rest)

    monkeypatch.setattr(llvm_ir, "for_iree", noted)
    return made


def test_code_is_kept_where_the_user_chose_a_folder(
    edits: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first = compile_kernel(KERNEL, "amdgpu", "gfx942")
    assert compile_kernel(KERNEL, "amdgpu", "gfx942") == first
    assert edits == ["row_sums"]
    renamed = compile_kernel(replace(KERNEL, name="renamed"), "amdgpu", "gfx942")
    assert b"renamed" in renamed.image
    assert compile_kernel(KERNEL, "amdgpu", "gfx1100").threads != first.threads
    assert edits == ["row_sums", "renamed", "row_sums"]


def test_else_nothing_is_kept(edits: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    first = compile_kernel(KERNEL, "amdgpu", "gfx942")
    assert compile_kernel(KERNEL, "amdgpu", "gfx942") == first
    assert edits == ["row_sums"] * 2
    assert list(tmp_path.iterdir()) == []
