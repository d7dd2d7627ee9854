"""Chunked prefill: fixed-size chunks, equal chunks together, decodes in invocations of their own.

Chunks are the same size when they fill the same number of pages: a last chunk of 122 tokens runs
beside one of 128 (8 pages of 16 both), a chunk of 44 does not.

Starvation: when both kinds of work wait, `prefills_per_decode` prefill invocations and one decode
invocation take turns. So a running stream waits at most that many chunks for its next token, and a
prompt gets that many chunks through for every token of the running streams, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput, Phase
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.request import Request


class DefaultMode(BatchMode):
    """`chunk_tokens` (a multiple of `stride`) is None when the model takes whole prompts only."""

    def __init__(
        self,
        *,
        stride: int,
        chunk_tokens: int | None,
        max_prefill_batch: int,
        max_decode_batch: int,
        prefills_per_decode: int = 1,
    ) -> None:
        assert chunk_tokens is None or (chunk_tokens > 0 and chunk_tokens % stride == 0)
        self._stride = stride
        self._chunk_tokens = chunk_tokens
        self._max_prefill_batch = max_prefill_batch
        self._max_decode_batch = max_decode_batch
        self._prefills_per_decode = prefills_per_decode
        self._prefills_since_decode = 0

    def make_task_inputs(self, request: Request) -> list[LlmTaskInput]:
        total = len(request.tokens)
        chunk = self._chunk_tokens or max(total, 1)
        return [
            self._task(request, start, min(start + chunk, total))
            for start in range(request.num_computed, total, chunk)
        ]

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes = [r for r in running if self._is_decode(r)]
        prefills = [r for r in running if not self._is_decode(r)]
        turn_over = self._prefills_since_decode >= self._prefills_per_decode
        if decodes and (turn_over or not prefills):
            self._prefills_since_decode = 0
            return self._decode_batch(decodes)
        if prefills:
            self._prefills_since_decode += 1
            return self._prefill_batch(prefills)
        return None

    def _is_decode(self, request: Request) -> bool:
        # A model without start positions cannot see the cache in a prefill, but its decode can.
        return request.num_uncomputed == 1 and request.num_computed > 0

    def _decode_batch(self, decodes: list[Request]) -> Batch:
        if len(decodes) > self._max_decode_batch:
            decodes = sorted(decodes, key=lambda r: r.last_turn)[: self._max_decode_batch]
        return Batch(Phase.DECODE, tuple(self._next_task(r) for r in decodes))

    def _prefill_batch(self, prefills: list[Request]) -> Batch:
        tasks = [self._next_task(r) for r in prefills]
        pages = self._num_pages(tasks[0])
        same = [task for task in tasks if self._num_pages(task) == pages]
        return Batch(Phase.PREFILL, tuple(same[: self._max_prefill_batch]))

    def _next_task(self, request: Request) -> LlmTaskInput:
        start, total = request.num_computed, len(request.tokens)
        chunk = self._chunk_tokens or total
        return self._task(request, start, min(start + chunk, total))

    def _num_pages(self, task: LlmTaskInput) -> int:
        return -(-len(task.input_tokens) // self._stride)

    @staticmethod
    def _task(request: Request, start: int, end: int) -> LlmTaskInput:
        return LlmTaskInput(request, request.tokens[start:end], start, end, request.page_ids)
