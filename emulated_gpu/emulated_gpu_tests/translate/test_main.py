"""The translator as a command, which the emulated GPU starts for each module."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from emulated_gpu.machine_code.code_object import read_code_object
from emulated_gpu.translate import pack, translate
from emulated_gpu.translate.__main__ import serve
from emulated_gpu_tests.code_objects import KernelSource
from emulated_gpu_tests.code_objects import code_object as code_object_of

S_ENDPGM, V_ADD_U32 = 0xBF810000, 0x68020602


@pytest.fixture(scope="module")
def code_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "code.co"
    kernels = [KernelSource("nothing", [S_ENDPGM]), KernelSource("adds", [V_ADD_U32, V_ADD_U32, S_ENDPGM])]
    path.write_bytes(code_object_of("gfx942", kernels))
    return path


def run(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "emulated_gpu.translate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_writes_the_program(code_object: Path, tmp_path: Path) -> None:
    assert run(code_object, tmp_path / "program") == ""
    expected = pack(translate(read_code_object(code_object.read_bytes())))
    assert (tmp_path / "program").read_bytes() == expected


def test_serves_requests_also_after_one_that_failed(
    code_object: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"no code object")
    programs = [tmp_path / name for name in "abc"]
    pairs = zip((code_object, wrong, code_object), programs, strict=True)
    answers = io.BytesIO()
    serve(io.BytesIO("".join(f"{each}\n{program}\n" for each, program in pairs).encode()), answers)
    assert answers.getvalue() == b"0\n1\n0\n"
    assert [path.exists() for path in programs] == [True, False, True]
    assert programs[0].read_bytes() == programs[2].read_bytes()
    assert "Traceback" in capsys.readouterr().err


def test_counts_operations(code_object: Path) -> None:
    lines = [line.split() for line in run(code_object, "--inventory").splitlines()]
    counts = {name: int(count) for name, count in lines}
    assert counts == {"s_endpgm": 2, "v_add_u32": 2}
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_prints_what_could_not_be_translated(code_object: Path) -> None:
    assert run(code_object, "--missing") == ""
