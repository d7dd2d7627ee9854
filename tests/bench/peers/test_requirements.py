from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.peers import requirements
from bench.peers.cache import Cache, SetUpError
from bench.peers.kinds import KINDS
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.requirements import CXX, C, Language, Needs, check
from bench.peers.subject import Subject
from bench.peers.vllm_cpu import VllmCpu

PLENTY_BYTES = 1 << 62


def executable(file: Path, script: str) -> Path:
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without programs or libraries, and a pip without an index. Returns its only folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("CC", "CXX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(requirements, "LDCONFIG", executable(tmp_path / "ldconfig", "exit 0"))
    return folder


def test_all_missing_requirements_are_reported_together(tmp_path: Path) -> None:
    needs = [
        Needs(("a tool; install it", "a library; install it")),
        Needs(("a tool; install it",), PLENTY_BYTES),
    ]
    with pytest.raises(SetUpError) as caught:
        check(tmp_path, needs)
    first, *rest, room = str(caught.value).splitlines()
    assert "missing" in first
    assert [line.strip() for line in rest] == ["a tool; install it", "a library; install it"]
    assert "give another --cache" in room
    check(tmp_path, [Needs(), Needs(disk_bytes=1)])


@pytest.mark.parametrize("language", [C, CXX])
def test_a_compiler_must_exist_and_work(
    language: Language, nothing_there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (missing,) = requirements.compiler(language)
    assert f"apt-get install {language.package}" in missing
    for says, works in (("echo no headers >&2; exit 1", False), ("exit 0", True)):
        executable(nothing_there / language.compilers[-1], says)
        assert (requirements.compiler(language) == []) is works
    executable(nothing_there / "other", "exit 7")
    monkeypatch.setenv(language.variable, "other -m64")
    (missing,) = requirements.compiler(language)
    assert "other -m64 says 'exit 7'" in missing


def test_a_library_is_found_by_its_linker_name(nothing_there: Path) -> None:
    (missing,) = requirements.shared_library("libx.so.4", "libx4")
    assert missing == "the library libx.so.4; on Debian: apt-get install libx4"
    listed = "libx.so.4 (libc6,x86-64) => /usr/lib/libx.so.4"
    executable(nothing_there.parent / "ldconfig", f"echo '\t{listed}'")
    assert requirements.find_library("libx.so.4") == "/usr/lib/libx.so.4"
    assert requirements.shared_library("libx.so.4", "libx4") == []


def test_an_interpreter_must_have_venv(nothing_there: Path) -> None:
    assert requirements.interpreter(sys.executable) == []
    for python in ("no-such-python", str(executable(nothing_there / "python", "exit 1"))):
        assert "python3-venv" in requirements.interpreter(python)[0]
        assert "python3-dev" in requirements.python_headers(python)[0]


def test_a_release_that_pip_does_not_find_is_missing(nothing_there: Path) -> None:
    assert "--vllm-python" in requirements.wheel(sys.executable, "torch", "2.13.0+cpu")[0]


def test_a_release_in_a_folder_of_wheels_is_found(
    nothing_there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thing-1.0+cpu-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert requirements.wheel(sys.executable, "thing", "1.0+cpu") == []
    assert requirements.wheel(sys.executable, "thing", "1.0") != []


def test_requirements_on_a_bare_machine(nothing_there: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path, lambda _: None)
    llama = LlamaCpp(cache, 1, 1, Subject()).needs(KINDS["bf16"])
    vllm = VllmCpu(cache, 1, sys.executable).needs(KINDS["bf16"])
    told = {name: "\n".join(needs.missing) for name, needs in (("llama", llama), ("vllm", vllm))}
    assert all(f"install {package}" in told["llama"] for package in ("gcc", "g++", "coreutils"))
    assert all(word in told["vllm"] for word in ("install g++", "libtcmalloc-minimal4", "torch 2.13.0+cpu"))
    assert 5e8 < llama.disk_bytes < vllm.disk_bytes


def test_a_finished_set_up_needs_no_space_or_compiler(nothing_there: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path, lambda _: None)
    llama = LlamaCpp(cache, 1, 1, Subject())
    cache.once(llama.stamp, llama.compiled, lambda: None)
    finished = VllmCpu(cache, 1, sys.executable)
    cache.once(finished.label, finished.installed, lambda: None)
    assert llama.needs(KINDS["bf16"]) == Needs()
    assert LlamaCpp(cache, 1, 1, Subject(device="cpu:haswell")).needs(KINDS["bf16"]).disk_bytes
    vllm = finished.needs(KINDS["bf16"])
    assert vllm.disk_bytes == 0
    assert not any("torch" in sentence for sentence in vllm.missing)
    assert any("tcmalloc" in sentence for sentence in vllm.missing)


@pytest.mark.parametrize(
    ("cpu", "fits"),
    [
        ("vendor_id: AuthenticAMD\nflags: avx2 avx512f", True),
        ("vendor_id: AuthenticAMD\nflags: avx2", False),
        ("vendor_id: GenuineIntel\nflags: avx2 avx512f", False),
    ],
)
def test_zentorch_is_for_amd_cpus_with_avx_512(
    cpu: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu, encoding="utf-8")
    monkeypatch.setattr(requirements, "CPU_INFO", tmp_path / "cpuinfo")
    cache = Cache(tmp_path, lambda _: None)
    named = [
        any(
            "AMD" in sentence
            for sentence in VllmCpu(cache, 1, sys.executable, zen).needs(KINDS["bf16"]).missing
        )
        for zen in (False, True)
    ]
    assert named == [False, not fits]


def test_the_real_machine_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test programs compile, where there is a compiler."""
    if not any(os.access(Path(folder, "g++"), os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("there is no g++ here")
    monkeypatch.setenv("CXX", "g++")
    assert requirements.compiler(CXX) == []
