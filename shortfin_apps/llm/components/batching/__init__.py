"""Registry of batching modes."""

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
# Choices of `--batch-mode`: a mode, or `auto` to choose by device.
MODE_CHOICES: Final[dict[str, type[ModeOptions]]] = {"auto": AutoModeOptions, **BATCH_MODES}
