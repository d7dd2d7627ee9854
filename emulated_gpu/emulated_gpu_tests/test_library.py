"""The library is built once, from what its sources are, and processes can be pointed at it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emulated_gpu import library
from emulated_gpu.errors import EmulatedGpuError
from emulated_gpu.library import FLAGS, LIBRARY, SOURCES, EmulatedGpu, build_library, program_cache, units_of
from emulated_gpu_tests.code_objects import KernelSource, code_object

END = 0xBF810000


def run(
    script: str, gpu: EmulatedGpu, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python script on an emulated GPU."""
    environment = os.environ | gpu.environment() | variables
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_the_library_is_built_once_and_found_again() -> None:
    first = build_library()
    assert first.name == LIBRARY
    before = first.stat().st_mtime_ns
    assert build_library() == first
    assert first.stat().st_mtime_ns == before


def test_another_library_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMULATED_GPU_LIBRARY", str(tmp_path / "mutant.so"))
    assert build_library() == tmp_path / "mutant.so"


def test_without_a_compiler_the_error_names_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMULATED_GPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EmulatedGpuError, match="apt-get install gcc libc6-dev"):
        build_library()


def test_a_changed_source_makes_another_library(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "hip", tmp_path / "hip")
    shutil.copytree(SOURCES / "wave", tmp_path / "wave")
    same = library._key_of_sources(tmp_path)
    assert same == library._key_of_sources(SOURCES)
    with (tmp_path / "wave" / "program.h").open("a") as file:
        file.write("// changed\n")
    assert library._key_of_sources(tmp_path) != same


def test_hip_sources_compile_without_a_warning() -> None:
    files = [str(unit.source) for unit in units_of(SOURCES) if unit.source.parent.name == "hip"]
    command = ["gcc", *FLAGS, "-Werror", "-fsyntax-only", *files]
    assert subprocess.run(command, capture_output=True, text=True, timeout=200, check=False).stderr == ""


# ---- processes

COUNT = "import ctypes, sys; n = ctypes.c_int(); "
LOAD = "gpu = ctypes.CDLL(__import__('os').environ['IREE_HIP_DYLIB_PATH'] + '/libamdhip64.so'); "


def test_a_process_gets_the_devices_it_was_given() -> None:
    script = COUNT + LOAD + "print(gpu.hipGetDeviceCount(ctypes.byref(n)), n.value)"
    assert run(script, EmulatedGpu(devices=3)).stdout.split() == ["0", "3"]
    assert run(script, EmulatedGpu(devices=0)).stdout.split() == ["100", "0"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("EMULATED_GPU_CHIP", "gfx908"), ("EMULATED_GPU_DEVICES", "many"), ("EMULATED_GPU_ORDER", "early")),
        *(("EMULATED_GPU_FAULTS", "explode"), ("EMULATED_GPU_MEMORY", "4G")),
    ],
)
def test_settings_that_are_not_understood_end_the_process(variable: str, value: str) -> None:
    result = run(COUNT + LOAD + "gpu.hipInit(0)", EmulatedGpu(), **{variable: value})
    assert result.returncode < 0
    assert value in result.stderr
    assert "is not understood" in result.stderr


def test_calls_are_logged_on_demand() -> None:
    result = run(COUNT + LOAD + "gpu.hipGetDeviceCount(ctypes.byref(n))", EmulatedGpu(logs_calls=True))
    assert "emulated_gpu: hipGetDeviceCount" in result.stderr


COMMAND = [sys.executable, "-m", "emulated_gpu", "--devices", "3"]
BY_NAME = (
    COUNT + "gpu = ctypes.CDLL('libamdhip64.so'); print(gpu.hipGetDeviceCount(ctypes.byref(n)), n.value)"
)


def test_a_command_finds_the_library_by_its_name() -> None:
    command = [*COMMAND, "--", sys.executable, "-c", BY_NAME]
    assert subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout == "0 3\n"


def test_without_a_command_it_prints_variables_for_a_shell() -> None:
    script = f'eval "$({shlex.join(COMMAND)})" && exec {shlex.join([sys.executable, "-c", BY_NAME])}'
    command = ["sh", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout == "0 3\n"


LOAD_MODULE = """
image = open(sys.argv[1], "rb").read(); module = ctypes.c_void_p()
print(gpu.hipModuleLoadData(ctypes.byref(module), image))
"""


def test_several_processes_translate_the_same_code_object_once(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(code_object("gfx942", [KernelSource("nothing", [END])]))
    cache = tmp_path / "programs"
    with ThreadPoolExecutor() as pool:
        results = list(
            pool.map(
                lambda _: run(
                    COUNT + LOAD + LOAD_MODULE, EmulatedGpu(), image, EMULATED_GPU_PROGRAMS=str(cache)
                ),
                range(4),
            )
        )
    assert [result.stdout.split() for result in results] == [["0"]] * 4
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".program"]


def test_a_translator_that_fails_makes_the_load_fail_and_keeps_the_code_object(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(code_object("gfx942", [KernelSource("nothing", [END])]))
    result = run(
        COUNT + LOAD + LOAD_MODULE,
        EmulatedGpu(),
        image,
        EMULATED_GPU_PROGRAMS=str(tmp_path / "programs"),
        EMULATED_GPU_PYTHON="false",
    )
    assert result.stdout.split() == ["200"]
    assert "the translator failed" in result.stderr
    (kept,) = (tmp_path / "programs").glob("*.hsaco")
    assert kept.read_bytes() == image.read_bytes()


KEEPS_ONE_TRANSLATOR = """
import ctypes, os, signal, sys
gpu = ctypes.CDLL(os.environ["IREE_HIP_DYLIB_PATH"] + "/libamdhip64.so")
module = ctypes.c_void_p()

def load(path):
    return gpu.hipModuleLoadData(ctypes.byref(module), open(path, "rb").read())

def translators():
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return [int(each) for each in children.read().split()]

first, second, third, fourth = sys.argv[1:]
assert load(first) == load(second) == 0
(translator,) = translators()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    assert load(third) == 0  # with another one
    os._exit(translators() == [translator])
assert translators() == [translator]
os.kill(translator, signal.SIGKILL)
assert load(fourth) != 0 and load(fourth) == 0
assert translators() != [translator]
"""


def test_a_process_keeps_one_translator_and_starts_another_when_that_ends(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(code_object("gfx942", [KernelSource(name, [END])]))
    images = [tmp_path / name for name in "abcd"]
    cache = str(tmp_path / "programs")
    result = run(KEEPS_ONE_TRANSLATOR, EmulatedGpu(), *images, EMULATED_GPU_PROGRAMS=cache)
    assert (result.returncode, result.stderr.count("Traceback")) == (0, 0), result.stderr


def test_programs_are_kept_by_the_translator_s_version() -> None:
    assert program_cache() == program_cache()
    assert program_cache().parent.name == "programs"


# ---- whole runtimes

IREE = """
import numpy as np, iree.runtime as rt
device = rt.get_driver("hip").create_device(rt.get_driver("hip").query_available_devices()[1])
array = np.arange(100_000, dtype=np.float32)
print(np.array_equal(rt.asdevicearray(device, array).to_host(), array))
"""

SHORTFIN = """
import numpy as np, shortfin as sf, shortfin.array as sfnp
builder = sf.amdgpu.SystemBuilder()
builder.visible_devices = builder.available_devices
system = builder.create_system()
fiber = system.create_fiber()
async def main():
    for device in (fiber.device(0), fiber.device(1)):
        there = sfnp.device_array(device, [1000], sfnp.float32)
        given = there.for_transfer()
        given.items = range(1000)
        there.copy_from(given)
        back = there.for_transfer()
        back.copy_from(there)
        await device
        print(list(back.items) == list(range(1000)))
system.run(main())
system.shutdown()
"""


@pytest.mark.parametrize("order", ["random", "late"])
def test_iree_sends_data_there_and_back(order: str) -> None:
    result = run(IREE, EmulatedGpu(devices=2, order="late" if order == "late" else "random"))
    assert result.stdout.split() == ["True"], result.stderr


def test_shortfin_sends_data_to_both_devices_and_back() -> None:
    pytest.importorskip("shortfin", reason="shortfin is not installed")
    result = run(SHORTFIN, EmulatedGpu(devices=2))
    assert result.stdout.split() == ["True", "True"], result.stderr
