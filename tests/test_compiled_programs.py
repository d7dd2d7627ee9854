from __future__ import annotations

import os
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.cache import ENVIRONMENT_VARIABLE
from shortfin_apps.llm.builder.target import resolve_target
from tests.compiled_programs import bound_cache, compile_program

PROGRAM = "func.func @{name}(%x: tensor<4xf32>) -> tensor<4xf32> {{ return %x : tensor<4xf32> }}"


def test_a_program_is_compiled_once_and_removed_when_the_cache_is_too_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    target = resolve_target("cpu")
    first = compile_program(PROGRAM.format(name="one"), target)
    made = first.stat().st_mtime_ns
    assert compile_program(PROGRAM.format(name="one"), target) == first
    assert first.stat().st_mtime_ns == made
    assert compile_program(PROGRAM.format(name="other"), target) != first
    bound_cache()
    assert first.exists()
    bound_cache(max_bytes=0)
    assert not first.exists()


def test_code_objects_and_translations_are_bounded_by_what_was_made_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    for kind in ("triton", "emulated-gpu/programs"):
        for age, name in enumerate(("new", "old", "older")):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            (folder / "code").write_bytes(bytes(100))
            os.utime(folder, (1000 - age, 1000 - age))
    bound_cache(max_bytes=250)
    assert {path.name for path in tmp_path.glob("*/*")} >= {"new", "old"}
    assert not list(tmp_path.rglob("older"))
