from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.invocation.page_count import pages_that_fit
from shortfin_apps.llm.components.runtime.device import EntrySignature, TensorType
from tests.components.fake_device import F32, FakeDevice, FakeProgram, Faults, fake_config

CONFIG = fake_config(stride=4, max_seq_len=64)  # pages of 16 bytes, 16 to a context
LOGITS = TensorType((2, 8), F32)
OWNED_BYTES = 2 * 8 * 4 + 100


class Owner(FakeProgram):
    """A program whose caller owns results and a workspace."""

    @property
    def entries(self) -> Any:
        signature = EntrySignature("decode_bs2", None, (LOGITS,), workspace_bytes=100)
        return MappingProxyType({"decode_bs2": signature})


def count(spare: int | None, max_running: int) -> int | None:
    program = Owner(CONFIG, Faults())
    device = FakeDevice(program)
    device.spare = spare
    return pages_that_fit(device, program, CONFIG, max_running)


@given(st.integers(0, 1 << 16), st.integers(1, 64))
def test_pages_fill_what_is_left_within_bounds(spare: int, max_running: int) -> None:
    pages = count(spare, max_running)
    assert pages is not None
    left = spare - OWNED_BYTES
    assert 1 + 16 <= pages <= 1 + 16 * max_running
    assert pages * 16 <= left or pages == 1 + 16
    assert (pages + 1) * 16 > left or pages == 1 + 16 * max_running


@pytest.mark.parametrize("max_running", [1, 8])
def test_a_device_that_does_not_tell_has_no_count(max_running: int) -> None:
    assert count(None, max_running) is None
