"""The registry of batching modes."""

from __future__ import annotations

from typing import Final

from shortfin_apps.llm.components.batching.mode import ModeOptions
from shortfin_apps.llm.components.batching.modes.auto import AutoModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions

BATCH_MODES: Final[dict[str, type[ModeOptions]]] = {
    "default": DefaultModeOptions,
    "extend-attention": ExtendAttentionOptions,
}
# What a user may ask for: a mode, or that the device decides.
MODE_CHOICES: Final[dict[str, type[ModeOptions]]] = {"auto": AutoModeOptions, **BATCH_MODES}
