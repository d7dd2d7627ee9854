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
    ("name", "is_packed", "expected"),
    [
        ("auto", True, ExtendAttentionMode),
        ("auto", False, DefaultMode),
        ("default", True, DefaultMode),
        ("extend-attention", False, ExtendAttentionMode),
    ],
)
def test_the_entries_decide_unless_a_mode_is_named(
    name: BatchModeName, is_packed: bool, expected: type
) -> None:
    assert batch_mode(name, Entries(has_packed_extend=is_packed)) is expected
