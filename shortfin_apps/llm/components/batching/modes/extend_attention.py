"""Extend-attention: prefill chunks and decodes in one invocation, limited by a token budget alone.

Order of a batch, and what it promises:

1. Decodes first, one row each, so a running stream waits for one invocation of at most the budget.
2. Prefill chunks fill what is left, oldest request first, each up to `chunk_tokens` and cut at a page
   boundary; a chunk that ends its prompt is counted as the pages it fills.
3. What is still left goes to the same requests in the same order: the target is soft, and one long
   chunk is the same work as two short ones in fewer invocations.

Beside decodes the budget prices a page by its context (token_budget.py): chunks get shorter as a long
prompt goes on. With nobody decoding a page is a page, and the budget may be larger.

While a prompt waits, one page of the budget is kept from the decodes (they rotate), so the oldest
prompt gets at least a page of every invocation however many streams run. No request has two tasks in a
batch: a longer chunk computes the same thing, as every layer stores a chunk's keys before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request


class ExtendAttentionMode(BatchMode):
    """`chunk_tokens` and the budget's are multiples of `stride`, in tokens."""

    def __init__(self, *, stride: int, chunk_tokens: int, budget: TokenBudget) -> None:
        assert chunk_tokens > 0
        assert chunk_tokens % stride == budget.while_decoding % stride == budget.alone % stride == 0
        assert budget.while_decoding >= 2 * stride, "no room for a page of prefill beside the decodes"
        self._stride = stride
        self._chunk_tokens = chunk_tokens
        self._budget = budget

    def make_task_inputs(self, request: Request) -> list[LlmTaskInput]:
        total = len(request.tokens)
        starts = range(request.num_computed, total, self._chunk_tokens)
        return [_task(request, start, min(start + self._chunk_tokens, total)) for start in starts]

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes = [r for r in running if _is_decode(r)]
        prefills = [r for r in running if not _is_decode(r)]
        budget = self._budget.tokens(bool(decodes))
        decodes = self._rotate(decodes, budget - (self._stride if prefills else 0))
        costs = [self._budget.page_cost(r.num_computed, bool(decodes)) for r in prefills]
        lengths = self._share(prefills, costs, budget - len(decodes))
        tasks = [_task(r, r.num_computed, r.num_computed + 1) for r in decodes]
        tasks += [
            _task(r, r.num_computed, min(r.num_computed + length, len(r.tokens)))
            for r, length in zip(prefills, lengths, strict=False)
            if length
        ]
        return Batch(EntryFamily.EXTEND, tuple(tasks)) if tasks else None

    @staticmethod
    def _rotate(decodes: list[Request], places: int) -> list[Request]:
        if len(decodes) <= places:
            return decodes
        return sorted(decodes, key=lambda r: r.last_turn)[:places]

    def _share(self, prefills: Sequence[Request], costs: Sequence[float], budget: int) -> list[int]:
        """Tokens (whole pages) for each prefill up to where the budget ends; none for one whose next page
        costs more than is left, which keeps nobody behind it out."""
        left = float(budget // self._stride)
        target = self._chunk_tokens // self._stride
        pages: list[int] = []
        for request, cost in zip(prefills, costs, strict=True):
            if pages and left < 1:
                break
            affordable = max(_pages_for(left, cost), 0 if pages else 1)  # the oldest always advances
            share = min(target, self._pages_left(request), affordable)
            pages.append(share)
            left -= share * cost
        for index, share in enumerate(pages):
            more = min(self._pages_left(prefills[index]) - share, _pages_for(left, costs[index]))
            pages[index] += more
            left -= more * costs[index]
        return [count * self._stride for count in pages]

    def _pages_left(self, request: Request) -> int:
        return -(-request.num_uncomputed // self._stride)


def _is_decode(request: Request) -> bool:
    return request.num_uncomputed == 1


def _pages_for(budget_pages: float, cost: float) -> int:
    return max(0, int(budget_pages / cost))


def _task(request: Request, start: int, end: int) -> LlmTaskInput:
    return LlmTaskInput(request, request.tokens[start:end], start, end, request.page_ids)
