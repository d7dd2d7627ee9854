from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.mode import ModeOptions
from shortfin_apps.llm.components.batching.modes.auto import AutoModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultMode, DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import (
    ExtendAttentionMode,
    ExtendAttentionOptions,
)
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, Entries
from tests.components.fake_device import fake_config

COMMON = {"chunk_tokens": 32, "token_budget": 96, "idle_budget": 128}


@pytest.mark.parametrize(
    ("options", "on_gpu", "expected"),
    [
        (AutoModeOptions(**COMMON), True, ExtendAttentionOptions(**COMMON)),
        (AutoModeOptions(**COMMON), False, DefaultModeOptions(**COMMON)),
        (AutoModeOptions(prefills_per_decode=2), True, DefaultModeOptions(prefills_per_decode=2)),
    ],
)
def test_the_device_decides_unless_a_setting_does(
    options: AutoModeOptions, on_gpu: bool, expected: ModeOptions
) -> None:
    assert options.chosen(ALL_ENTRIES, on_gpu=on_gpu) == expected


def test_a_vmfb_without_extend_gets_the_default_mode() -> None:
    assert AutoModeOptions().chosen(Entries(has_extend=False), on_gpu=True) == DefaultModeOptions()


def test_makes_the_chosen_mode() -> None:
    config = fake_config()
    assert isinstance(AutoModeOptions().make(config, ALL_ENTRIES, on_gpu=True), ExtendAttentionMode)
    assert isinstance(AutoModeOptions().make(config, ALL_ENTRIES), DefaultMode)
