from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.kernels.ahead_of_time import kernel_cache
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tuning
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel_cache import KernelCache

pytest.importorskip("triton", reason="Triton is not installed")
from tests.builder.kernels.ahead_of_time import row_sums
from tests.builder.kernels.ahead_of_time.test_executable import KERNEL

CODE = CodeObject(b"\x7fELF\n\n\x00", threads=256, shared_bytes=64)
INTERFACE = KERNEL.interface
OTHERS = {
    "name": replace(KERNEL, name="renamed"),
    "constexprs": replace(KERNEL, constexprs={**KERNEL.constexprs, "BLOCK": 256}),
    "tuning": replace(KERNEL, tuning=Tuning(num_waves=8)),
    "types": replace(KERNEL, interface=replace(INTERFACE, writes=dict(INTERFACE.reads))),
}


def test_code_is_loaded_as_it_was_stored(tmp_path: Path) -> None:
    assert KernelCache(tmp_path, "gfx942").load(KERNEL) is None
    KernelCache(tmp_path, "gfx942").store(KERNEL, CODE)
    assert KernelCache(tmp_path, "gfx942").load(KERNEL) == CODE
    assert len(list((tmp_path / "gfx942").iterdir())) == 1


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_kernel_has_other_code(tmp_path: Path, other: Kernel) -> None:
    KernelCache(tmp_path, "gfx942").store(KERNEL, CODE)
    assert KernelCache(tmp_path, "gfx942").load(other) is None


def test_the_grid_is_not_part_of_the_code(tmp_path: Path) -> None:
    KernelCache(tmp_path, "gfx942").store(KERNEL, CODE)
    assert KernelCache(tmp_path, "gfx942").load(replace(KERNEL, grid=[7])) == CODE


def test_other_chips_releases_sources_and_variables_have_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(tmp_path, "gfx942")
    cache.store(KERNEL, CODE)
    assert KernelCache(tmp_path, "gfx1100").load(KERNEL) is None
    for name, value in (("version", lambda _: "0"), ("_code_hash", lambda: "0")):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache, name, value)
            assert cache.load(KERNEL) is None
    with monkeypatch.context() as patch:
        patch.setattr(row_sums.row_sums, "hash", "an edit of the kernel or what it calls")
        assert cache.load(KERNEL) is None
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        assert cache.load(KERNEL) is None
    assert cache.load(KERNEL) == CODE


@given(st.data())
def test_a_damaged_file_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("cache")
    cache = KernelCache(root, "gfx942")
    cache.store(KERNEL, CODE)
    [path] = (root / "gfx942").iterdir()
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    for found in (bytes(damaged), bytes(whole[:place])):
        path.write_bytes(found)
        assert cache.load(KERNEL) is None
    cache.store(KERNEL, CODE)
    assert cache.load(KERNEL) == CODE


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    cache = KernelCache(tmp_path, "gfx942")
    cache.store(KERNEL, CODE)
    assert list((tmp_path / "gfx942").iterdir()) == []
    assert cache.load(KERNEL) is None


def test_a_folder_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = KernelCache(tmp_path / "file", "gfx942")
    cache.store(KERNEL, CODE)
    assert cache.load(KERNEL) is None
    assert (tmp_path / "file").read_text() == "not a folder"


def test_code_is_loaded_although_its_use_cannot_be_dated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    cache = KernelCache(tmp_path, "gfx942")
    cache.store(KERNEL, CODE)
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.load(KERNEL) == CODE


def test_a_file_is_dated_by_its_last_use(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, "gfx942")
    cache.store(KERNEL, CODE)
    [path] = (tmp_path / "gfx942").iterdir()
    os.utime(path, (0, 0))
    cache.load(KERNEL)
    assert path.stat().st_mtime > 0
