"""Registry of batching modes."""

from __future__ import annotations

from typing import Final

from shortfin_apps.llm.components.batching.mode import (
    BatchMode,
    BatchModeName,
    BatchSettings,
    CompiledEntries,
)
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionMode
from shortfin_apps.llm.contract.config import ModelConfig

BATCH_MODES: Final[dict[BatchModeName, type[BatchMode]]] = {
    "default": DefaultMode,
    "extend-attention": ExtendAttentionMode,
}


def make_mode(
    settings: BatchSettings, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False
) -> BatchMode:
    """Create the mode that `settings` selects. Raises ArtifactError if settings or model do not allow it."""
    return batch_mode(settings.batch_mode, entries).make(settings, config, entries, on_gpu=on_gpu)


def batch_mode(name: BatchModeName, entries: CompiledEntries) -> type[BatchMode]:
    """Return the class of a mode; `auto` is extend-attention if the VMFB has a packed `extend`, else default.

    Each invocation has to read all weights. On CPUs and GPUs, prompts and decodes that share one therefore
    take less time than a prefill and a decode (docs/measurements.md), and packed rows need no padding.
    """
    if name == "auto":
        return ExtendAttentionMode if entries.has_packed_extend else DefaultMode
    return BATCH_MODES[name]
