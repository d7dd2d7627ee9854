"""The library's reports, in its own process and to others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emulated_gpu.control import Control, Finding, Misuse, Report, read_report
from emulated_gpu.library import SOURCES, EmulatedGpu
from emulated_gpu_tests.code_objects import KernelSource, code_object

# s_load_dwordx2 s[2:3] from the argument; v_mov_b32 v0, 0; a store of it there, twice; s_endpgm
STORE = [0xC0060080, 0, 0xBF8CC07F, 0x7E000280, *(0xDC708000, 0x00020000) * 2, 0xBF810000]
WILD = KernelSource('wild "kernel"', STORE, [(0, 8, "global_buffer")])

LAUNCH = """
import ctypes, os, sys
gpu = ctypes.CDLL(os.environ["IREE_HIP_DYLIB_PATH"] + "/libamdhip64.so")
module, function, stream, address = (ctypes.c_void_p() for _ in range(4))
def call(name, *arguments):
    status = getattr(gpu, name)(*arguments)
    assert status == 0, (name, status)
call("hipModuleLoadData", ctypes.byref(module), open(sys.argv[1], "rb").read())
call("hipModuleGetFunction", ctypes.byref(function), module, b'wild "kernel"')
call("hipMalloc", ctypes.byref(address), ctypes.c_size_t(100))
value = ctypes.c_uint64(int(sys.argv[2], 0))
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
call("hipModuleLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, parameters, None)
call("hipDeviceSynchronize")
"""


def run(script: str, gpu: EmulatedGpu, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | gpu.environment() | {"PYTHONPATH": str(SOURCES.parent)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(code_object("gfx942", [WILD]))
    return path


def test_a_process_writes_findings_and_at_its_end_a_summary(tmp_path: Path, image: Path) -> None:
    report_path = tmp_path / "report"
    with run(LAUNCH, EmulatedGpu(report=report_path), image, 0x10) as process:
        assert process.wait(200) == 0
    report = read_report(report_path)
    assert isinstance(report, Report)
    assert {finding.instruction for finding in report.findings} == {"global_store"}
    first = report.findings[0]
    assert (first.kind, first.kernel, first.address) == ("outside_memory", 'wild "kernel"', 0x10)
    assert (first.workgroup, first.wave) == ((0, 0, 0), 0)
    assert report.devices[0].used_bytes == 100
    assert report.calls["hipModuleLaunchKernel"] == 1
    assert report.kernels['wild "kernel"'].instructions["store"] == 2
    lines = report_path.read_text().splitlines()
    assert len(lines) == 1 + len(report.findings)


def test_of_a_process_that_is_killed_the_findings_are_there(tmp_path: Path, image: Path) -> None:
    report_path = tmp_path / "report"
    script = LAUNCH + "print('launched', flush=True); sys.stdin.read()"
    with run(script, EmulatedGpu(report=report_path), image, 0x10) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "launched\n"
        process.kill()
    found = read_report(report_path)
    assert isinstance(found, tuple)
    assert found
    assert all(isinstance(finding, Finding) and finding.kind == "outside_memory" for finding in found)


def test_a_process_takes_commands_from_its_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = """
import ctypes, os, sys, time
gpu = ctypes.CDLL(os.environ["IREE_HIP_DYLIB_PATH"] + "/libamdhip64.so")
gpu.hipInit(0)
print("started", flush=True)
end, status = time.monotonic() + 100, 0
while not status and time.monotonic() < end:
    status = gpu.hipGetDeviceCount(ctypes.byref(ctypes.c_int()))
print(status)
"""
    with run(script, EmulatedGpu(control=pipe), "unused") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        pipe.write_text("fail hipGetDeviceCount 1 2\n")
        assert process.stdout.readline() == "2\n"
        assert process.wait(200) == 0


def test_faults_of_the_environment_are_armed_when_the_process_starts(tmp_path: Path, image: Path) -> None:
    gpu = EmulatedGpu(report=tmp_path / "report", faults=("stall 0", "resume 0", "fail hipMalloc 1 2"))
    with run(
        LAUNCH.replace("assert status == 0, (name, status)", "print(name, status)"), gpu, image, 0
    ) as process:
        out, _ = process.communicate(timeout=200)
    assert "hipMalloc 2" in out.splitlines()


def test_misuses_are_in_the_file_as_well(tmp_path: Path) -> None:
    script = """
import ctypes, os
gpu = ctypes.CDLL(os.environ["IREE_HIP_DYLIB_PATH"] + "/libamdhip64.so")
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gpu.hipInit(0))
gpu.hipLaunchHostFunc(None, function, None)
gpu.hipDeviceSynchronize()
os._exit(0)
"""
    with run(script, EmulatedGpu(report=tmp_path / "report"), "unused") as process:
        assert process.wait(200) == 0
    assert read_report(tmp_path / "report") == (
        Misuse("hipInit", "called in a host function of a stream", 0, 1),
    )


def test_a_cleared_report_is_empty(fresh: Control) -> None:
    fresh.clear_report()
    report = fresh.report()
    assert (dict(report.kernels), report.findings, report.misuses) == ({}, (), ())
    assert [device.error for device in report.devices] == ["hipSuccess"] * 2
