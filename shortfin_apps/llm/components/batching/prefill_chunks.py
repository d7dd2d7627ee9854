"""Prefill chunks: selects the parts of prompts for one prefill invocation.

Two chunks are equal if they fill the same number of pages: with pages of 16 tokens, a last chunk of 122
tokens runs together with one of 128, as both fill 8 pages; a chunk of 44 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request


class PrefillChunks:
    """Cuts prompts into chunks of `chunk_tokens` (None: not at all), and selects the ones that run together.

    Without a budget, the oldest prompt's chunk runs with the equal chunks of other prompts, up to the largest
    of `row_buckets`.

    With a budget, which includes padding rows:

    - Equal chunks run together, as many as the budget holds, if at most a quarter of the rows is padding.
    - A prompt with more tokens left than these chunks have in total runs alone in one chunk as long as the
      budget allows: fewer, longer chunks are the same work and read the weights less often. So does a prompt
      that such a chunk finishes, if it overtook another or if requests decode: cutting it to share
      invocations would make more invocations for the decodes to wait for.
    - A prompt that one invocation finishes may overtake older ones, but not twice in a row: a short prompt
      does not wait for a long one, which still gets every other invocation.
    """

    def __init__(
        self,
        *,
        stride: int,
        chunk_tokens: int | None,
        row_buckets: Sequence[int],
        budget: TokenBudget | None = None,
    ) -> None:
        assert chunk_tokens is None or (chunk_tokens > 0 and chunk_tokens % stride == 0)
        self._stride = stride
        self._chunk_tokens = chunk_tokens
        self._row_buckets = sorted(row_buckets)
        self.budget = budget
        self._overtook = False  # whether the last invocation's first prompt overtook an older one

    @property
    def max_task_tokens(self) -> int | None:
        """Maximum tokens of a task; None if that may be a full prompt."""
        return self._chunk_tokens if self.budget is None else max(self._stride, self.budget.most)

    @property
    def max_tokens_beside_decodes(self) -> int:
        """Maximum tokens of an invocation while requests decode; without a budget, of a chunk or a page."""
        return self.budget.while_decoding if self.budget else self._chunk_tokens or self._stride

    def next_tasks(self, prefills: Sequence[Request], has_decodes: bool) -> list[LlmTaskInput]:
        """Select the tasks of the next invocation; `prefills` has at least one prompt, oldest first."""
        if self.budget is None:
            return self._equal_chunks(prefills[0], prefills)
        budget, backlog_tokens = self.budget, sum(request.num_uncomputed for request in prefills)
        tokens = budget.tokens(int(has_decodes), backlog_tokens)

        def max_pages(request: Request, num_rows: int = 1) -> int:
            """Maximum pages per row for `num_rows` rows including `request`; at least one."""
            cost = budget.page_cost(request.num_computed, has_decodes=has_decodes)
            return max(1, int(tokens / self._stride / (self._padded_rows(num_rows) * cost)))

        def holds(tasks: Sequence[LlmTaskInput]) -> bool:
            return self._num_pages(tasks[0]) <= min(max_pages(task.request, len(tasks)) for task in tasks)

        first = self._first(prefills, max_pages)
        single = LlmTaskInput.next_of(first, max_pages(first) * self._stride)
        equal = self._equal_chunks(first, prefills)
        counts = [n for n in range(2, len(equal) + 1) if self._has_little_padding(n)]
        several = equal[: max((n for n in counts if holds(equal[:n])), default=0)]
        if sum(len(task.token_ids) for task in several) < len(single.token_ids):
            return [single]
        is_cut = single.completes and not several[0].completes
        return [single] if is_cut and (has_decodes or self._overtook) else several

    def _first(self, prefills: Sequence[Request], max_pages: Callable[[Request], int]) -> Request:
        """The oldest prompt, or one that may overtake it, which an invocation of its own finishes."""
        oldest = prefills[0]
        short = next((r for r in prefills if r.num_uncomputed <= max_pages(r) * self._stride), oldest)
        self._overtook = short is not oldest and not self._overtook
        return short if self._overtook else oldest

    def _equal_chunks(self, first: Request, prefills: Sequence[Request]) -> list[LlmTaskInput]:
        """The chunk of `first` and the equal chunks of other prompts, up to the largest number of rows."""
        requests = (first, *(r for r in prefills if r is not first))
        tasks = [LlmTaskInput.next_of(r, self._chunk_tokens or len(r.token_ids)) for r in requests]
        pages = self._num_pages(tasks[0])
        return [task for task in tasks if self._num_pages(task) == pages][: self._row_buckets[-1]]

    def _has_little_padding(self, num_rows: int) -> bool:
        """Whether at most a quarter of the rows is padding, or the smallest entry is used."""
        rows = self._padded_rows(num_rows)
        return rows == self._row_buckets[0] or 4 * num_rows >= 3 * rows

    def _padded_rows(self, num_rows: int) -> int:
        return next(rows for rows in self._row_buckets if rows >= num_rows)

    def _num_pages(self, task: LlmTaskInput) -> int:
        return -(-len(task.token_ids) // self._stride)
