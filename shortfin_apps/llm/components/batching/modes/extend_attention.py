"""Extend-attention: prefill chunks and decodes in one invocation, limited only by a token budget.

A batch is filled in this order:

1. Decodes, one token row each. A decoding request therefore waits for one invocation of at most the budget.
   If a request has several known tokens to decode, each is one more row.
2. Prefill chunks, oldest request first. Each has up to `chunk_tokens` tokens and ends at a page boundary or
   at the end of the prompt; the last chunk of a prompt counts as full pages.
3. The remaining budget lengthens these chunks, oldest request first: `chunk_tokens` is a soft target, because
   one long chunk is the same work as two short ones in fewer invocations.

While requests decode, a page of prefill costs more of the budget the longer its context is (token_budget.py),
so chunks get shorter as a long prompt proceeds. While no request decodes, a page costs one page, and the
budget may be larger.

While a prompt waits, decodes may not use the last page of the budget, and take turns if they do not all fit:
the oldest prompt gets at least a page of every invocation, however many requests decode. No prompt has two
chunks in a batch: one longer chunk has the same result, because every layer stores a chunk's keys and values
before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput, decode_tasks
from shortfin_apps.llm.components.batching.mode import (
    BatchMode,
    BatchSettings,
    CompiledEntries,
    takes_several_decodes,
    whole_pages,
)
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError

# On a CPU. According to tests/components/batching/test_policy.py, a budget for full batches of default chunks
# would make decodes wait twice as long under many prompts. A budget of 192 reduced the throughput of workload
# W3 by a tenth (docs/measurements.md).
DEFAULT_EXTEND_BUDGET = 256
# CPUs are busy with far fewer rows: more requests would only make each one slower.
GPU_MAX_RUNNING = 256


class ExtendAttentionMode(BatchMode):
    """Fills each invocation with decodes and prefill chunks up to the budget.

    `chunk_tokens` and the token counts of `budget` must be multiples of `stride`. `several_decodes`: a batch
    may have several decodes of one request (`takes_several_decodes`).
    """

    mixes = True

    def __init__(
        self, *, stride: int, chunk_tokens: int, budget: TokenBudget, several_decodes: bool = False
    ) -> None:
        assert chunk_tokens > 0
        assert chunk_tokens % stride == budget.while_decoding % stride == budget.idle % stride == 0
        assert budget.while_decoding >= 2 * stride, "no room for a page of prefill beside the decodes"
        self._stride = stride
        self._chunk_tokens = chunk_tokens
        self.budget: TokenBudget = budget
        self._several_decodes = several_decodes

    @classmethod
    def make(
        cls, settings: BatchSettings, config: ModelConfig, entries: CompiledEntries, *, on_gpu: bool = False
    ) -> Self:
        least = 2 * config.stride
        if settings.token_budget is not None and whole_pages(settings.token_budget, config) < least:
            raise ArtifactError(
                f"a token budget of {settings.token_budget} has no room for a decode and a "
                f"page of prefill, as this model's pages hold {config.stride} tokens; give `--token-budget "
                f"{least}` or more, or none"
            )
        if not entries.has_extend:
            raise ArtifactError(
                "the VMFB has no `extend` entry, which batch mode extend-attention needs; "
                "rebuild it with `shortfin-llm build`, or use `--batch-mode default`"
            )
        return cls(
            stride=config.stride,
            chunk_tokens=settings.chunk(config),
            budget=settings.budget(config, max(DEFAULT_EXTEND_BUDGET, least), on_gpu=on_gpu),
            several_decodes=takes_several_decodes(config, entries),
        )

    @staticmethod
    def default_max_running(config: ModelConfig, *, on_gpu: bool) -> int:
        return GPU_MAX_RUNNING if on_gpu else max(config.decode_batch_sizes)

    @property
    def max_task_tokens(self) -> int | None:
        return self.budget.most

    def spare_tokens(self, batch: Batch) -> int:
        return int(self.budget.while_decoding - sum(map(self._taken, batch.tasks)))

    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in running:
            (decodes if request.decodes else prefills).append(request)
        tokens = self.budget.tokens(len(decodes), sum(r.num_unplanned for r in prefills))
        if decodes:  # they do not reduce the prompts' share of a budget below the largest
            tokens = min(self.budget.while_decoding, tokens + len(decodes))
        costs = [self.budget.page_cost(r.num_planned, has_decodes=bool(decodes)) for r in prefills]
        max_rows = tokens - (self._stride if prefills else 0)
        decodes = self._rotate(decodes, max_rows)
        tasks = decode_tasks(decodes, max_rows if self._several_decodes else len(decodes))
        lengths = self._share(prefills, costs, tokens - len(tasks))
        tasks += [
            LlmTaskInput.next_of(r, length) for r, length in zip(prefills, lengths, strict=False) if length
        ]
        return Batch(EntryFamily.EXTEND, tuple(tasks)) if tasks else None

    def _taken(self, task: LlmTaskInput) -> float:
        """Return how many tokens of the budget a task costs while requests decode."""
        if len(task.token_ids) == 1:
            return 1
        pages = -(-len(task.token_ids) // self._stride)
        return pages * self._stride * self.budget.page_cost(task.start_position, has_decodes=True)

    @staticmethod
    def _rotate(decodes: list[Request], max_rows: int) -> list[Request]:
        """Select at most `max_rows` of the decodes: the ones that have waited longest, if there are more."""
        if len(decodes) <= max_rows:
            return decodes
        return sorted(decodes, key=lambda r: r.last_turn)[:max_rows]

    def _share(self, prefills: Sequence[Request], costs: Sequence[float], tokens: int) -> list[int]:
        """Return the number of tokens for each prefill, in full pages, until the budget is used up.

        A prefill gets 0 tokens if its next page costs more than the remaining budget; later prefills may
        still get some. Prefills after the last number get none.
        """
        left = float(tokens // self._stride)
        target = self._chunk_tokens // self._stride
        pages: list[int] = []
        for request, cost in zip(prefills, costs, strict=True):
            if pages and left < 1:
                break
            affordable = max(_pages_for(left, cost), 0 if pages else 1)  # the oldest prompt gets a page
            share = min(target, self._pages_left(request), affordable)
            pages.append(share)
            left -= share * cost
        for index, share in enumerate(pages):
            more = min(self._pages_left(prefills[index]) - share, _pages_for(left, costs[index]))
            pages[index] += more
            left -= more * costs[index]
        return [count * self._stride for count in pages]

    def _pages_left(self, request: Request) -> int:
        return -(-request.num_unplanned // self._stride)


def _pages_for(budget_pages: float, cost: float) -> int:
    return max(0, int(budget_pages / cost))
