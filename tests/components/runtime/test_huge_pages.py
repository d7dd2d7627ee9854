from __future__ import annotations

import mmap

import numpy as np
import pytest

from shortfin_apps.llm.components.runtime.huge_pages import HUGE_PAGE, empty_bytes, use_huge_pages


@pytest.mark.parametrize("size", [0, 1, 4095, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_is_aligned_and_usable(size: int) -> None:
    memory = empty_bytes(size)
    assert memory.nbytes == size
    assert size == 0 or memory.ctypes.data % mmap.PAGESIZE == 0
    memory[:] = 7
    assert (memory == 7).all()


def test_requesting_huge_pages_keeps_the_content() -> None:
    array = np.arange(HUGE_PAGE, dtype=np.int64)
    use_huge_pages(array[3:])
    np.testing.assert_array_equal(array, np.arange(HUGE_PAGE))
