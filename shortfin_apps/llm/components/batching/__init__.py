"""The registry of batching modes."""

from __future__ import annotations

from shortfin_apps.llm.components.batching.mode import ModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions

BATCH_MODES: dict[str, type[ModeOptions]] = {
    "default": DefaultModeOptions,
    "extend-attention": ExtendAttentionOptions,
}
