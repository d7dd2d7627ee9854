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
    return batch_mode(settings.batch_mode, entries, on_gpu=on_gpu).make(
        settings, config, entries, on_gpu=on_gpu
    )


def batch_mode(name: BatchModeName, entries: CompiledEntries, *, on_gpu: bool) -> type[BatchMode]:
    """Return the class of a mode; `auto` is extend-attention on GPUs with an `extend` entry, else default.

    Each invocation on a GPU has to read all weights. Prompts that share an invocation with decodes therefore
    cost little, and packed token rows need no padding. On CPUs, both modes have the same throughput, and the
    default mode has shorter steps.
    """
    if name == "auto":
        return ExtendAttentionMode if on_gpu and entries.has_extend else DefaultMode
    return BATCH_MODES[name]
