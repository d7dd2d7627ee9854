from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shortfin_apps.llm.components.runtime import iree_gpu
from shortfin_apps.llm.components.runtime import open as open_module
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.iree_release import Release
from tests.runtimes import RUNTIMES, SHORTFIN, needs_shortfin

LEAVE = """
import sys
from pathlib import Path
import numpy as np
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import InvocationError

directory, runtime, close = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "close"
device = open_device("cpu", runtime)
program = device.load_program(directory / "fenced.vmfb", [directory / "model.irpa"], "m")
cache = device.allocate((8,), np.dtype(np.float32))
ones = device.upload(np.ones(8, np.float32))
results = program.submit("accumulate", [ones, cache]).wait()
try:
    program.submit("accumulate", [device.upload(np.ones(3)), cache]).wait()
except InvocationError:
    pass
pending = program.submit("accumulate", [ones, cache])
if close:
    device.close()
"""

WORKERS = """
import sys
from pathlib import Path
from shortfin_apps.llm.components.runtime import iree_local
tasks = Path("/proc/self/task")
before = len(list(tasks.iterdir()))
iree_local.open_local_task(int(sys.argv[1]) or None)
print(len(list(tasks.iterdir())) - before)
"""

IMPORTS = """
import sys
import shortfin_apps.llm.components.runtime.check
import shortfin_apps.llm.components.runtime.open
print([name for name in ("shortfin", "_shortfin", "iree.runtime", "iree.compiler") if name in sys.modules])
"""


@pytest.mark.parametrize("name", ["cpu", "local-task", "hostcpu"])
def test_every_name_of_the_cpu_opens_it(name: str) -> None:
    device = open_device(name)
    assert device.name == "local-task"  # what `auto` means here
    device.close()


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArtifactError, match="no device 'tpu'; choose one of amdgpu, cpu, cuda, hip"):
        open_device("tpu")
    with pytest.raises(ArtifactError, match=r"--device hip,cpu: a list .* name one kind, .* `--device auto`"):
        open_device("hip,cpu")


def test_the_number_of_threads_is_fixed_for_the_process() -> None:
    open_device("cpu", "iree").close()
    with pytest.raises(ArtifactError, match=r"already runs the CPU driver with .* threads, not 63"):
        open_device("cpu", "iree", threads=63)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_one_worker_for_each_cpu_unless_told_otherwise(threads: int) -> None:
    command = [sys.executable, "-c", WORKERS, str(threads)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    one_poller = 1
    assert int(ended.stdout) - one_poller == (threads or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("runtime", ["auto", "iree", SHORTFIN])
@pytest.mark.parametrize("name", ["hip", "amdgpu"])
def test_without_the_hip_runtime_it_says_what_to_do(
    name: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IREE_HIP_DYLIB_PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"libamdhip64.so\) was not found; install ROCm.*`--device cpu`"):
        open_device(name, runtime, device_ids=["0"])


def test_shortfin_knows_no_nvidia_gpus() -> None:
    with pytest.raises(ArtifactError, match="leave `--runtime` at auto"):
        open_device("cuda", "shortfin")


def test_the_log_says_once_that_amdgpu_means_hip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("IREE_HIP_DYLIB_PATH", str(tmp_path))
    for name in ("amdgpu", "hip"):
        with pytest.raises(ArtifactError):
            open_device(name)
    assert caplog.text.count("`amdgpu` means `hip` here") == 1


def test_without_shortfin_the_cpu_runs_on_iree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_module, "has_shortfin", lambda: False)
    device = open_device("cpu", "shortfin")
    assert device.name == "local-task"
    device.close()
    assert "shortfin is not installed: the model runs on the IREE runtime" in caplog.text


def test_without_shortfin_amd_gpus_run_on_iree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_module, "has_shortfin", lambda: False)
    opened: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(iree_gpu, "open_gpu", lambda *arguments: opened.append(arguments))
    open_device("hip", "auto", device_ids=["1"])
    assert "shortfin is not installed" not in caplog.text
    open_device("amdgpu", "shortfin")
    assert opened == [("hip", ["1"]), ("hip", ())]
    assert "shortfin is not installed: the model runs on the IREE runtime" in caplog.text


@needs_shortfin
@pytest.mark.parametrize(("device", "runtime"), [("cpu", "shortfin"), ("hip", "shortfin"), ("hip", "auto")])
def test_shortfin_beside_another_release_of_iree_is_refused(
    device: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_module, "runtime_release", lambda: Release(3, 13))
    with pytest.raises(
        ArtifactError, match=r"shortfin 3\.9 .* IREE 3\.13 .*`pip install 'iree-base-compiler==3\.9"
    ):
        open_device(device, runtime)


@pytest.mark.parametrize("close", ["close", "leave"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_process_exits_with_a_device_in_any_state(artefacts: Path, runtime: str, close: str) -> None:
    """With live buffers, an invocation in flight and one that failed."""
    command = [sys.executable, "-W", "error", "-c", LEAVE, str(artefacts), runtime, close]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "leak" not in ended.stderr


def test_importing_the_interface_imports_no_runtime() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
