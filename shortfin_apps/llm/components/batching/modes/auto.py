"""Mode chosen by device: extend-attention on GPUs, the default mode on CPUs.

A GPU reads the weights in each invocation, whatever it computes. Prompts that share an invocation with
decodes therefore cost little, and packed rows need no padding. On CPUs both modes are equally fast, and the
default mode's steps are shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shortfin_apps.llm.components.batching.mode import BatchMode, CompiledEntries, ModeOptions
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.batching.modes.extend_attention import ExtendAttentionOptions
from shortfin_apps.llm.contract.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoModeOptions(DefaultModeOptions):
    """Options of either mode; setting an option that only the default mode has selects that mode."""

    def chosen(self, entries: CompiledEntries, *, on_gpu: bool) -> ModeOptions:
        common = {field.name: getattr(self, field.name) for field in fields(ExtendAttentionOptions)}
        is_for_default = self.prefills_per_decode != DefaultModeOptions().prefills_per_decode
        if on_gpu and entries.has_extend and not is_for_default:
            return ExtendAttentionOptions(**common)
        return DefaultModeOptions(**common, prefills_per_decode=self.prefills_per_decode)

    def make(self, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False) -> BatchMode:
        return self.chosen(entries, on_gpu=on_gpu).make(config, entries, on_gpu=on_gpu)
