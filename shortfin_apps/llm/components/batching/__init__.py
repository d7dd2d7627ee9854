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
    """Create the mode that the settings name. Raises ArtifactError if they or the model do not allow it."""
    return batch_mode(settings.batch_mode, entries, on_gpu=on_gpu).make(
        settings, config, entries, on_gpu=on_gpu
    )


def batch_mode(name: BatchModeName, entries: CompiledEntries, *, on_gpu: bool) -> type[BatchMode]:
    """Return the mode of that name; `auto` is extend-attention on GPUs, if the entries allow it.

    A GPU reads the weights in each invocation, whatever it computes. Prompts that share an invocation with
    decodes therefore cost little, and packed rows need no padding. On CPUs both modes are equally fast, and
    the default mode's steps are shorter.
    """
    if name == "auto":
        return ExtendAttentionMode if on_gpu and entries.has_extend else DefaultMode
    return BATCH_MODES[name]
