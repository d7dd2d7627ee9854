from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.invocation.page_count import (
    least_window_pages,
    named_page_count,
    page_table_bytes,
    pages_that_fit,
    window_page_count,
)
from shortfin_apps.llm.components.runtime.device import EntrySignature, TensorType
from shortfin_apps.llm.contract.abi import num_places
from tests.components.fake_device import F32, VOCAB, FakeDevice, FakeProgram, Faults, fake_config

CONFIG = fake_config(stride=4, max_seq_len=64)  # pages of 16 bytes, 16 to a context
LOGITS = TensorType((2, 8), F32)
OWNED_BYTES = 2 * 8 * 4 + 100
LAST_TOKENS = 8 * num_places(1)  # bytes of each slot


class Owner(FakeProgram):
    """A program with an entry that counts tokens; the caller owns its results and workspace."""

    @property
    def entries(self) -> Any:
        signature = EntrySignature("decode_bs2", None, (LOGITS,), workspace_bytes=100)
        adjusted = {name: each for name, each in super().entries.items() if name.startswith("adjusted")}
        return MappingProxyType({"decode_bs2": signature, **adjusted})


def count(spare: int | None, max_running: int) -> int | None:
    program = Owner(CONFIG, Faults(), adjusted_sample_sizes=(2,))
    device = FakeDevice(program)
    device.spare = spare
    return pages_that_fit(device, program, CONFIG, max_running)


@given(st.integers(0, 1 << 16), st.integers(1, 64))
def test_pages_fill_what_is_left_within_bounds(spare: int, max_running: int) -> None:
    pages = count(spare, max_running)
    assert pages is not None
    left = spare - OWNED_BYTES - max_running * (LAST_TOKENS + 4 * VOCAB)
    assert 1 + 16 <= pages <= 1 + 16 * max_running
    assert pages * 16 <= left or pages == 1 + 16
    assert (pages + 1) * 16 > left or pages == 1 + 16 * max_running


@pytest.mark.parametrize("max_running", [1, 8])
def test_a_device_that_does_not_tell_has_no_count(max_running: int) -> None:
    assert count(None, max_running) is None


ALL_WINDOWED = fake_config(stride=4, max_seq_len=64, window=12, all_windowed=True)
WINDOWED = fake_config(stride=4, max_seq_len=64, window=12)  # window pages of 16 bytes too


@pytest.mark.parametrize(
    ("num_pages", "tokens_ahead", "expected"),
    [
        (10, None, 10),  # as many as pages where a whole prompt is computed at once
        (8, 8, 8),  # never more than pages
        (33, 8, 8 + 4 * 33 * 5 * 4 // 64),  # what one request needs, and what those of 16 tokens hold
    ],
)
def test_window_pages_by_pages(num_pages: int, tokens_ahead: int | None, expected: int) -> None:
    assert least_window_pages(WINDOWED, 8) == 1 + (12 + 8) // 4 + 2
    assert window_page_count(WINDOWED, num_pages, tokens_ahead) == min(num_pages, expected)


def test_a_model_without_windows_has_no_window_pages() -> None:
    assert window_page_count(CONFIG, 100, 8) == 0
    assert page_table_bytes(CONFIG, 100, 0) == 100 * 16
    assert page_table_bytes(WINDOWED, 100, 30) == 130 * 16


def test_where_all_layers_have_a_window_all_memory_is_of_window_pages() -> None:
    """Of 64 tokens in 16 pages, a request that decodes holds 5; and it has names for all."""
    assert page_table_bytes(ALL_WINDOWED, 100, window_page_count(ALL_WINDOWED, 100, 8)) == 100 * 16
    assert page_table_bytes(ALL_WINDOWED, 100, 100) == 100 * 4 * 4
    assert named_page_count(ALL_WINDOWED, 11) == 1 + 2 * 16
    assert named_page_count(WINDOWED, 11) == named_page_count(CONFIG, 11) == 11
    device = FakeDevice(FakeProgram(ALL_WINDOWED))
    device.spare = 1600 + 8 * LAST_TOKENS
    assert pages_that_fit(device, device.program, ALL_WINDOWED, 8, tokens_ahead=8) == 1600 // 16


@given(st.integers(0, 1 << 14), st.integers(1, 20))
def test_both_kinds_of_pages_fill_what_is_left(spare: int, max_running: int) -> None:
    device = FakeDevice(FakeProgram(WINDOWED))
    device.spare = spare
    pages = pages_that_fit(device, device.program, WINDOWED, max_running, tokens_ahead=8)
    assert pages is not None

    def taken(count: int) -> int:
        return page_table_bytes(WINDOWED, count, window_page_count(WINDOWED, count, 8))

    assert 1 + 16 <= pages <= 1 + 16 * max_running
    left = spare - max_running * LAST_TOKENS
    assert taken(pages) <= left or pages == 1 + 16
    assert taken(pages + 1) > left or pages == 1 + 16 * max_running
