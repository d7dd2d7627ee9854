"""Replay schedules: co-batched requests, chunking, cache state and batch mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.contract.config import ModelConfig

CHUNK_PAGES = 1  # chunk size of a chunked schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How to compute an answer again.

    `is_warm`: all full pages of prompt and output are in the prefix cache. `fills_batch`: other prompts run
    in the same steps. `is_chunked`: prompts are computed one page at a time. `preempts`: requests lose their
    pages after the first token, and again halfway.
    """

    name: str
    mode: BatchModeName = "default"
    is_warm: bool = False
    fills_batch: bool = False
    is_chunked: bool = False
    preempts: bool = False

    @property
    def suits_any_model(self) -> bool:
        """Whether every model has the required entries."""
        return self.mode == "default" and not self.is_chunked

    @property
    def prefix_cache(self) -> PrefixCache:
        return "trie" if self.is_warm else "none"

    def mode_options(self, config: ModelConfig) -> BatchSettings:
        chunk_tokens = CHUNK_PAGES * config.stride if self.is_chunked else None
        budget = None if chunk_tokens is None else chunk_tokens + config.stride
        return BatchSettings(batch_mode=self.mode, chunk_tokens=chunk_tokens, token_budget=budget)


EXTEND: Final = "extend-attention"
SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="alone"),
        Schedule(name="warm", is_warm=True),
        Schedule(name="full-batch", fills_batch=True),
        Schedule(name="chunked", is_chunked=True),
        Schedule(name="preempted", preempts=True),
        Schedule(name=EXTEND, mode=EXTEND),
        Schedule(name=f"{EXTEND}-full-batch", mode=EXTEND, fills_batch=True),
        Schedule(name=f"{EXTEND}-preempted", mode=EXTEND, preempts=True),
    )
}
