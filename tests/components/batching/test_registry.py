from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching import BATCH_MODES, batch_mode, make_mode
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, Entries
from tests.components.fake_device import fake_config


def test_modes_by_name() -> None:
    assert {"default": DefaultMode, "extend-attention": ExtendAttentionMode} == BATCH_MODES
    for name, mode in BATCH_MODES.items():
        made = make_mode(BatchSettings(batch_mode=name), fake_config(), ALL_ENTRIES)
        assert type(made) is mode


@pytest.mark.parametrize(
    ("name", "on_gpu", "expected"),
    [
        ("auto", True, ExtendAttentionMode),
        ("auto", False, DefaultMode),
        ("default", True, DefaultMode),
        ("extend-attention", False, ExtendAttentionMode),
    ],
)
def test_the_device_decides_unless_a_mode_is_named(name: BatchModeName, on_gpu: bool, expected: type) -> None:
    assert batch_mode(name, ALL_ENTRIES, on_gpu=on_gpu) is expected


def test_a_vmfb_without_extend_gets_the_default_mode() -> None:
    assert batch_mode("auto", Entries(has_extend=False), on_gpu=True) is DefaultMode
