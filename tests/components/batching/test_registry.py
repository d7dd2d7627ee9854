from __future__ import annotations

from shortfin_apps.llm.components.batching import BATCH_MODES, MODE_CHOICES
from shortfin_apps.llm.components.batching.modes.auto import AutoModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions


def test_modes_by_name() -> None:
    assert BATCH_MODES["default"] is DefaultModeOptions
    assert BATCH_MODES["extend-attention"] is ExtendAttentionOptions
    assert {"auto": AutoModeOptions, **BATCH_MODES} == MODE_CHOICES
