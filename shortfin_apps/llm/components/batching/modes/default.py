"""Chunked prefill: prefill and decode run in separate, alternating invocations.

While both prefills and decodes wait, each decode invocation is followed by one prefill invocation, so neither
starves. A decoding request waits for at most one prefill between two tokens. Prompts get one prefill
invocation per decode invocation, however many requests decode.

If requests have several known tokens to decode, an `extend` computes them at once, as far as the budget of a
prefill allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from shortfin_apps.llm.components.batching.batch import Batch, decode_tasks
from shortfin_apps.llm.components.batching.mode import (
    BatchMode,
    BatchSettings,
    CompiledEntries,
    takes_several_decodes,
)
from shortfin_apps.llm.components.batching.prefill_chunks import PrefillChunks
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError

# On a CPU. According to tests/components/batching/test_policy.py, a budget for full batches of default chunks
# would make decodes wait 50 % longer under many prompts; fewer steps would not raise throughput.
DEFAULT_PREFILL_BUDGET = 320


class DefaultMode(BatchMode):
    """Alternates invocations: while both kinds wait, `prefills_per_decode` prefills follow each decode.

    `several_decodes`: a batch may have several decodes of one request (`takes_several_decodes`).
    """

    def __init__(
        self,
        *,
        chunks: PrefillChunks,
        max_decode_batch: int,
        prefills_per_decode: int = 1,
        several_decodes: bool = False,
    ) -> None:
        self._chunks = chunks
        self.budget = chunks.budget
        self._max_decode_batch = max_decode_batch
        self.prefills_per_decode = prefills_per_decode
        self._several_decodes = several_decodes
        self._prefills_since_decode = 0

    @classmethod
    def make(
        cls, settings: BatchSettings, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False
    ) -> Self:
        if settings.chunk_tokens is not None and not config.has_prefill_position:
            raise ArtifactError(
                "a chunk length was given, but this model takes whole prompts only (`has_prefill_position` "
                "is false in its config.json); leave out `--chunk-tokens`, or export it with that option"
            )
        return cls(
            chunks=PrefillChunks(
                stride=config.stride,
                chunk_tokens=settings.chunk(config) if config.has_prefill_position else None,
                row_buckets=config.prefill_batch_sizes,
                budget=_prefill_budget(settings, config, entries, on_gpu=on_gpu),
            ),
            max_decode_batch=max(config.decode_batch_sizes),
            several_decodes=takes_several_decodes(config, entries),
        )

    @staticmethod
    def default_max_running(config: ModelConfig, *, on_gpu: bool) -> int:
        return max(config.decode_batch_sizes)

    @property
    def max_task_tokens(self) -> int | None:
        return self._chunks.max_task_tokens

    def spare_tokens(self, batch: Batch) -> int:
        return self._chunks.max_tokens_beside_decodes - len(batch.tasks)

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes = [r for r in running if _is_decode(r)]
        prefills = [r for r in running if not _is_decode(r)]
        decode_is_due = self._prefills_since_decode >= self.prefills_per_decode
        if decodes and (decode_is_due or not prefills):
            self._prefills_since_decode = 0
            return self._decode_batch(decodes)
        if prefills:
            self._prefills_since_decode += 1
            return Batch(EntryFamily.PREFILL, tuple(self._chunks.next_tasks(prefills, len(decodes))))
        return None

    def _decode_batch(self, decodes: list[Request]) -> Batch:
        if len(decodes) > self._max_decode_batch:
            decodes = sorted(decodes, key=lambda r: r.last_turn)[: self._max_decode_batch]
        max_rows = self._chunks.max_tokens_beside_decodes if self._several_decodes else len(decodes)
        tasks = decode_tasks(decodes, max_rows)
        family = EntryFamily.DECODE if len(tasks) == len(decodes) else EntryFamily.EXTEND
        return Batch(family, tuple(tasks))


def _prefill_budget(
    settings: BatchSettings, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool
) -> TokenBudget | None:
    """Create the prefill budget; None if chunks have a fixed size.

    Chunks have a fixed size if only a chunk length was given, as in upstream's servers, or if the VMFB takes
    only full prompts or chunks of certain lengths.
    """
    if not config.has_prefill_position or not entries.takes_any_chunk:
        return None
    if settings.chunk_tokens is not None and settings.token_budget is None:
        return None
    return settings.budget(config, DEFAULT_PREFILL_BUDGET, on_gpu=on_gpu)


def _is_decode(request: Request) -> bool:
    # A prefill of a model without start positions cannot attend to cached tokens, so a single token after
    # cached ones must be a decode.
    return request.decodes and request.num_planned > 0
