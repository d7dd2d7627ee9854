from __future__ import annotations

import platform
from pathlib import Path

import pytest

from shortfin_apps.llm import host_cpu
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.host_cpu import missing_features


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 fma avx512_bf16 amx_tile\n\nprocessor : 1\n")
    return path


def test_names_what_is_missing(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "permit_amx", lambda: True)
    assert missing_features(["avx2", "avx512bf16", "amx-tile"], cpuinfo) == []
    assert missing_features(["avx2", "avx512vnni", "avx512f"], cpuinfo) == ["avx512f", "avx512vnni"]


def test_amx_without_the_permission_is_missing(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "permit_amx", lambda: False)
    assert missing_features(["avx2", "amx-tile"], cpuinfo) == ["amx-tile"]


def test_features_that_linux_does_not_report_are_not_missed(cpuinfo: Path) -> None:
    assert missing_features(["64bit", "cmov", "sahf", "crc32"], cpuinfo) == []


def test_arm_names(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert missing_features(["neon", "dotprod", "sve"], path) == ["sve"]


@pytest.mark.parametrize(("architecture", "other"), [("arm_64", True), ("x86_64", False), ("amdgpu", False)])
def test_a_program_for_another_architecture(
    architecture: str, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert host_cpu.is_of_another_architecture(architecture) == other
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not host_cpu.is_of_another_architecture(architecture)


def test_a_host_that_does_not_say_lacks_nothing(tmp_path: Path) -> None:
    assert missing_features(["avx512f"], tmp_path / "none") == []


def test_this_host_has_what_the_compiler_finds_here() -> None:
    assert missing_features(resolve_target("cpu").features) == []
