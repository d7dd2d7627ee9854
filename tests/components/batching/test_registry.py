from __future__ import annotations

from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions


def test_modes_by_name() -> None:
    assert BATCH_MODES["default"] is DefaultModeOptions
    assert BATCH_MODES["extend-attention"] is ExtendAttentionOptions
