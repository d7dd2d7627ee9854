"""Free memory of the host, as its files report it, libraries that are mapped, and huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.components.runtime import memory
from shortfin_apps.llm.components.runtime.memory import (
    HUGE_PAGE,
    empty_bytes,
    loaded_library,
    spare_host_bytes,
    use_huge_pages,
)

MIB = 1 << 20


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a host that has 512 MiB available."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def test_half_of_what_a_host_has_available_may_be_taken(host: Path) -> None:
    assert spare_host_bytes() == 256 * MIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 256), (str(300 * MIB), 100), (str(50 * MIB), 0)])
def test_a_control_group_may_leave_less(host: Path, limit: str, expected: int) -> None:
    (host / "memory.max").write_text(limit + "\n")
    (host / "memory.current").write_text(f"{100 * MIB}\n")
    assert spare_host_bytes() == expected * MIB


def test_a_host_without_proc_tells_nothing(host: Path) -> None:
    (host / "meminfo").unlink()
    assert spare_host_bytes() is None


def test_a_library_is_found_where_it_was_loaded_from() -> None:
    library = loaded_library("libc.so")
    assert library is not None
    assert library.getpid() > 0


def test_names_of_other_mapped_files_may_have_any_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    lines = [b"00-10 r-xp 0 0 1 /a\x0b\xc2\x85/b\xff.so", b"", b"00-10 r-xp 0 0 0", b"10-20 r-xp 0 0 1 /c"]
    maps.write_bytes(b"\n".join(lines) + b"\n")
    monkeypatch.setattr(memory, "MAPS", maps)
    assert memory.loaded_library("libnone.so") is None


def test_a_library_that_is_not_loaded_is_not_found() -> None:
    assert loaded_library("libnothing.so") is None


@pytest.mark.parametrize("size", [0, 1, 4095, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_is_aligned_and_usable(size: int) -> None:
    array = empty_bytes(size)
    assert array.nbytes == size
    assert size == 0 or array.ctypes.data % mmap.PAGESIZE == 0
    array[:] = 7
    assert (array == 7).all()


def test_requesting_huge_pages_keeps_the_content() -> None:
    array = np.arange(HUGE_PAGE, dtype=np.int64)
    use_huge_pages(array[3:])
    np.testing.assert_array_equal(array, np.arange(HUGE_PAGE))
