from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time import worker_processes
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.worker_processes import compile_in_workers

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.ahead_of_time.test_executable import KERNEL

KERNELS = [replace(KERNEL, name=f"row_sums_{n}") for n in range(3)]


class Named:
    """A function that a worker looks up by these names."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__name__ = name


DEADLY = replace(KERNEL, name="deadly", function=Named("tests.builder.kernels.ahead_of_time.deadly", "f"))
MISSING = replace(KERNEL, name="missing", function=Named(__name__, "no_such_function"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """The workers that were started; their temporary files are in `tmp_path`."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if worker_processes.__name__ in args[0]:  # not Triton's tools
                processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return processes


def compiled(kernels: Sequence[Kernel], num_workers: int, chip: str = "gfx942") -> dict[str, CodeObject]:
    codes: dict[str, CodeObject] = {}
    architecture = "amdgpu" if chip.startswith("gfx") else "nvptx"
    compile_in_workers(
        kernels, architecture, chip, num_workers, lambda kernel, code: codes.update({kernel.name: code})
    )
    return codes


@pytest.mark.parametrize("chip", ["gfx942", "sm_90"])
def test_workers_and_this_process_make_the_same_bytes(
    chip: str, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    architecture = "amdgpu" if chip.startswith("gfx") else "nvptx"
    codes = compiled(KERNELS, 2, chip)
    assert codes == {kernel.name: compile_kernel(kernel, architecture, chip) for kernel in KERNELS}
    assert len(started) == 2


def test_the_other_workers_go_on_when_one_is_killed(started: list[subprocess.Popen[bytes]]) -> None:
    codes = compiled([DEADLY, *KERNELS], 2)
    assert codes.keys() == {kernel.name for kernel in KERNELS}
    assert all(process.returncode is not None for process in started)


def test_without_workers_nothing_is_compiled(started: list[subprocess.Popen[bytes]]) -> None:
    assert compiled([DEADLY, *KERNELS], 1) == {}


def test_a_worker_goes_on_after_a_kernel_that_fails(started: list[subprocess.Popen[bytes]]) -> None:
    assert compiled([MISSING, KERNEL], 1).keys() == {KERNEL.name}
    assert len(started) == 1


def test_an_interrupt_ends_the_workers_and_removes_their_files(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    def interrupted(kernel: Kernel, code: CodeObject) -> None:
        assert list(tmp_path.iterdir()) != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_in_workers(KERNELS, "amdgpu", "gfx942", 2, interrupted)
    assert [process.returncode is not None for process in started] == [True] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_worker_ends_with_the_build(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    with worker_processes._worker(str(tmp_path)) as connection:
        connection.close()  # as the system does when the build's process ends
        [process] = started
        assert process.wait(timeout=60) == 0


def test_processes_that_cannot_be_started_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compiled(KERNELS, 2) == {}
