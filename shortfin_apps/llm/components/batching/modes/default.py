"""Chunked prefill: prefill and decode run in separate, alternating invocations.

When both kinds of work wait, each decode invocation is followed by `prefills_per_decode` prefill invocations,
so neither starves: a decoding request waits for at most that many prefills between two tokens, and prompts
get that many prefills for each token of the decoding requests, regardless of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchMode, CompiledEntries, ModeOptions
from shortfin_apps.llm.components.batching.prefill_chunks import PrefillChunks
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError

# On a CPU. According to tests/components/batching/test_policy.py, with full batches of default chunks,
# decodes would wait 50 % longer when there are many prompts, and fewer steps would not raise throughput.
DEFAULT_PREFILL_BUDGET = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultModeOptions(ModeOptions):
    """`prefills_per_decode` prefill invocations run for each decode when both have work."""

    prefills_per_decode: int = 1

    def make(self, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False) -> BatchMode:
        self._check(config)
        return DefaultMode(
            chunks=PrefillChunks(
                stride=config.stride,
                chunk_tokens=self.chunk(config) if config.has_prefill_position else None,
                row_buckets=config.prefill_batch_sizes,
                budget=self._prefill_budget(config, entries, on_gpu=on_gpu),
            ),
            max_decode_batch=max(config.decode_batch_sizes),
            prefills_per_decode=self.prefills_per_decode,
        )

    def default_max_running(self, config: ModelConfig) -> int:
        return max(config.decode_batch_sizes)

    def _check(self, config: ModelConfig) -> None:
        if self.chunk_tokens is not None and not config.has_prefill_position:
            raise ArtifactError(
                "a chunk length was given, but this model takes whole prompts only (`has_prefill_position` "
                "is false in its config.json); leave out `--chunk-block-size`, or export it with that option"
            )

    def _prefill_budget(
        self, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool
    ) -> TokenBudget | None:
        """The prefill budget; None keeps chunks at one size.

        Chunks have one size if only a chunk length was given, as upstream's servers cut prompts, and if only
        full prompts or chunks of fixed lengths were compiled.
        """
        has_budget = {self.token_budget, self.idle_budget, self.min_budget} != {None}
        if not config.has_prefill_position or not entries.takes_any_chunk:
            return None
        if self.chunk_tokens is not None and not has_budget:
            return None
        return self.budget_of(config, DEFAULT_PREFILL_BUDGET, on_gpu=on_gpu)


class DefaultMode(BatchMode):
    def __init__(self, *, chunks: PrefillChunks, max_decode_batch: int, prefills_per_decode: int = 1) -> None:
        self._chunks = chunks
        self._max_decode_batch = max_decode_batch
        self._prefills_per_decode = prefills_per_decode
        self._prefills_since_decode = 0

    @property
    def max_task_tokens(self) -> int | None:
        return self._chunks.max_task_tokens

    @property
    def budget(self) -> TokenBudget | None:
        return self._chunks.budget

    def tune(self, budget: TokenBudget) -> None:
        self._chunks.tune(budget)

    def spare_tokens(self, batch: Batch) -> int:
        return self._chunks.max_tokens_beside_decodes - len(batch.tasks)

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes = [r for r in running if _is_decode(r)]
        prefills = [r for r in running if not _is_decode(r)]
        decode_is_due = self._prefills_since_decode >= self._prefills_per_decode
        if decodes and (decode_is_due or not prefills):
            self._prefills_since_decode = 0
            return self._decode_batch(decodes)
        if prefills:
            self._prefills_since_decode += 1
            return Batch(EntryFamily.PREFILL, tuple(self._chunks.next_tasks(prefills, bool(decodes))))
        return None

    def _decode_batch(self, decodes: list[Request]) -> Batch:
        if len(decodes) > self._max_decode_batch:
            decodes = sorted(decodes, key=lambda r: r.last_turn)[: self._max_decode_batch]
        return Batch(EntryFamily.DECODE, tuple(LlmTaskInput.next_of(r, 1) for r in decodes))


def _is_decode(request: Request) -> bool:
    # A model without start positions cannot see the cache in a prefill, but its decode can.
    return request.num_uncomputed == 1 and request.num_computed > 0
