from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract import host_cpu
from shortfin_apps.llm.contract.host_cpu import HostCpu, decisive_features, this_host

# Of features that Linux and LLVM both name so.
NAMES = ("avx", "avx2", "avx512f", "avx512bw", "fma", "f16c", "gfni", "vaes", "movbe", "adx", "clwb", "sha")


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 fma avx512_bf16 amx_tile\n\nprocessor : 1\n")
    return path


def test_names_what_is_missing(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "permit_amx", lambda: True)
    assert this_host(cpuinfo).missing(["avx2", "avx512bf16", "amx-tile"]) == []
    assert this_host(cpuinfo).missing(["avx2", "avx512vnni", "avx512f"]) == ["avx512f", "avx512vnni"]


def test_amx_without_the_permission_is_missing(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "permit_amx", lambda: False)
    assert this_host(cpuinfo).missing(["avx2", "amx-tile"]) == ["amx-tile"]


def test_features_that_linux_does_not_report_are_not_missed(cpuinfo: Path) -> None:
    assert this_host(cpuinfo).missing(["64bit", "cmov", "sahf", "crc32"]) == []


def test_arm_names(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp atomics\n")
    needed = ["neon", "fp-armv8", "dotprod", "lse", "sve", "fullfp16", "v8.4a", "pauth"]
    assert this_host(path).missing(needed) == ["fullfp16", "sve"]


def test_x86_names(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t: pni sse4_1 abm bmi1 popcnt fma\n")
    needed = ["sse3", "sse4.1", "lzcnt", "bmi", "popcnt", "fma", "bmi2", "fma4", "movbe"]
    assert this_host(path).missing(needed) == ["bmi2", "fma4", "movbe"]


@given(needed=st.frozensets(st.sampled_from(NAMES)), has=st.frozensets(st.sampled_from(NAMES)))
def test_what_is_missing_is_what_decides_and_is_not_there(
    needed: frozenset[str], has: frozenset[str]
) -> None:
    host = HostCpu("x86_64", has | {"fpu"})
    assert set(host.missing(needed)) == decisive_features(needed) - has
    assert HostCpu("x86_64", frozenset()).missing(needed) == []


@pytest.mark.parametrize(("architecture", "other"), [("arm_64", True), ("x86_64", False), ("amdgpu", False)])
def test_a_program_for_another_architecture(
    architecture: str, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert this_host().is_of_another_architecture(architecture) == other
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not this_host().is_of_another_architecture(architecture)


def test_a_host_that_does_not_say_lacks_nothing(tmp_path: Path) -> None:
    assert this_host(tmp_path / "none").missing(["avx512f"]) == []


def test_this_host_has_what_the_compiler_finds_here() -> None:
    assert this_host().missing(resolve_target("cpu").features) == []
