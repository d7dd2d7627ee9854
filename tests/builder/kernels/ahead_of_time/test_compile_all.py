from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.kernels.ahead_of_time import compile_all
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile_all import ParallelCompiler, compile_here
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.worker_processes import Keep
from shortfin_apps.llm.builder.program.module import ModelModule
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import HYBRID

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.ahead_of_time.test_executable import KERNEL

KERNELS = [replace(KERNEL, name=f"row_sums_{n}") for n in range(4)]


class FakeTriton:
    """Compiles a kernel to its name; kernels in `refused` fail."""

    def __init__(self, *refused: str) -> None:
        self.here: list[str] = []
        self.in_workers: list[str] = []
        self._refused = refused

    def compile_kernel(self, kernel: Kernel, architecture: str, chip: str) -> CodeObject:
        self.here.append(kernel.name)
        if kernel.name in self._refused:
            raise BuildError(f"{kernel.name} is refused")
        return code_of(kernel, chip)

    def compile_in_workers(
        self, kernels: Sequence[Kernel], architecture: str, chip: str, num_workers: int, keep: Keep
    ) -> None:
        for kernel in reversed(kernels):
            if kernel.name not in self._refused:
                self.in_workers.append(kernel.name)
                keep(kernel, code_of(kernel, chip))


def code_of(kernel: Kernel, chip: str) -> CodeObject:
    return CodeObject(f"{kernel.name} for {chip}".encode(), threads=64)


def use(monkeypatch: pytest.MonkeyPatch, *refused: str) -> FakeTriton:
    fake = FakeTriton(*refused)
    monkeypatch.setattr(compile_all, "compile_kernel", fake.compile_kernel)
    monkeypatch.setattr(compile_all, "compile_in_workers", fake.compile_in_workers)
    return fake


def names(kernels: Sequence[Kernel]) -> set[str]:
    return {kernel.name for kernel in kernels}


def test_only_kernels_that_the_cache_lacks_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, said = use(monkeypatch), list[str]()
    compile_kernels = ParallelCompiler(tmp_path, said.append, num_workers=2)
    compile_kernels(KERNELS[1:3], "amdgpu", "gfx942")
    assert names(KERNELS[1:3]) == set(fake.in_workers)
    codes = compile_kernels(KERNELS, "amdgpu", "gfx942")
    assert codes == [code_of(kernel, "gfx942") for kernel in KERNELS]
    assert compile_kernels(KERNELS, "amdgpu", "gfx942") == codes
    assert sorted(fake.in_workers) == sorted(names(KERNELS))
    assert said == [
        "compiling 2 kernels for gfx942, 0 from the cache",
        "compiling 2 kernels for gfx942, 2 from the cache",
    ]


@pytest.mark.parametrize(("num_workers", "num_kernels"), [(1, 4), (8, 1)])
def test_no_process_is_started_for_one_at_a_time(
    num_workers: int, num_kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch)
    kernels = KERNELS[:num_kernels]
    codes = ParallelCompiler(tmp_path, print, num_workers)(kernels, "amdgpu", "gfx942")
    assert codes == [code_of(kernel, "gfx942") for kernel in kernels]
    assert fake.here == [kernel.name for kernel in kernels]
    assert fake.in_workers == []


def test_this_process_compiles_what_workers_left_out_and_raises_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch, KERNELS[2].name)
    compile_kernels = ParallelCompiler(tmp_path, print, num_workers=2)
    with pytest.raises(BuildError, match="row_sums_2 is refused"):
        compile_kernels(KERNELS, "amdgpu", "gfx942")
    assert fake.here == ["row_sums_2"]
    fake = use(monkeypatch)
    assert compile_kernels(KERNELS, "amdgpu", "gfx942") == [code_of(each, "gfx942") for each in KERNELS]
    assert fake.here == ["row_sums_2"]  # the others were kept


def test_a_cache_that_cannot_be_written_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    (tmp_path / "file").write_bytes(b"")
    codes = ParallelCompiler(tmp_path / "file", print, num_workers=2)(KERNELS, "amdgpu", "gfx942")
    assert codes == [code_of(kernel, "gfx942") for kernel in KERNELS]


@pytest.mark.slow
def test_every_kernel_of_a_model_is_the_same_from_workers_and_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(device="hip:gfx942", prefill_batch_sizes=(1,), decode_batch_sizes=(4,))
    target = resolve_target(options.device)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    alone = ModelModule(HYBRID, options, target, compile_here).text()

    def refuse(kernel: Kernel, *_: str) -> None:
        pytest.fail(f"{kernel.name} is compiled in this process")

    monkeypatch.setattr(compile_all, "compile_kernel", refuse)
    in_workers = ModelModule(HYBRID, options, target, ParallelCompiler(tmp_path, print, 2)).text()
    monkeypatch.setattr(compile_all, "compile_in_workers", refuse)
    cached = ModelModule(HYBRID, options, target, ParallelCompiler(tmp_path, print, 2)).text()
    assert alone == in_workers == cached
