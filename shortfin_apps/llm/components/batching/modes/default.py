"""Chunked prefill: chunks of prompts in invocations of their own, in turns with decodes.

Which chunks of which prompts is decided by `FixedChunks` or `BudgetedChunks` (prefill_chunks.py).

Starvation: when both kinds of work wait, `prefills_per_decode` prefill invocations and one decode
invocation take turns. So a running stream waits at most that many chunks for its next token, and a
prompt gets that many chunks through for every token of the running streams, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.prefill_chunks import FixedChunks
from shortfin_apps.llm.components.request.request import Request


class DefaultMode(BatchMode):
    def __init__(self, *, chunks: FixedChunks, max_decode_batch: int, prefills_per_decode: int = 1) -> None:
        self._chunks = chunks
        self._max_decode_batch = max_decode_batch
        self._prefills_per_decode = prefills_per_decode
        self._prefills_since_decode = 0

    def make_task_inputs(self, request: Request) -> list[LlmTaskInput]:
        return self._chunks.all_tasks(request)

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes = [r for r in running if _is_decode(r)]
        prefills = [r for r in running if not _is_decode(r)]
        turn_over = self._prefills_since_decode >= self._prefills_per_decode
        if decodes and (turn_over or not prefills):
            self._prefills_since_decode = 0
            return self._decode_batch(decodes)
        if prefills:
            self._prefills_since_decode += 1
            return Batch(EntryFamily.PREFILL, tuple(self._chunks.next_tasks(prefills, bool(decodes))))
        return None

    def _decode_batch(self, decodes: list[Request]) -> Batch:
        if len(decodes) > self._max_decode_batch:
            decodes = sorted(decodes, key=lambda r: r.last_turn)[: self._max_decode_batch]
        return Batch(EntryFamily.DECODE, tuple(_decode_task(r) for r in decodes))


def _is_decode(request: Request) -> bool:
    # A model without start positions cannot see the cache in a prefill, but its decode can.
    return request.num_uncomputed == 1 and request.num_computed > 0


def _decode_task(request: Request) -> LlmTaskInput:
    start = request.num_computed
    return LlmTaskInput(request, request.tokens[start:], start, len(request.tokens), request.page_ids)
