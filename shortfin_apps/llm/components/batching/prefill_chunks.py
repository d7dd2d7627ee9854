"""Selects the prefill chunks of one invocation.

Two chunks are called equal if they occupy the same number of pages. With pages of 16 tokens, a prompt's last
chunk of 122 tokens can run together with one of 128, because both occupy 8 pages, but not with one of 44.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request


class PrefillChunks:
    """Splits prompts into chunks of `chunk_tokens` (None: whole prompts); selects which run together.

    Without a budget, the oldest prompt's chunk runs with the equal chunks of other prompts. `row_buckets` are
    the compiled batch sizes; the largest limits the number of chunks.

    With a budget, which includes padding rows:

    - Equal chunks run together, as many as the budget allows, if at most a quarter of the rows are padding.
    - The first prompt (the oldest, or one that overtakes it) instead runs alone, in one chunk as long as the
      budget allows, if that chunk has more tokens than the equal chunks have in total: fewer, longer chunks
      read the weights less often.
    - The first prompt also runs alone if that chunk completes the prompt, and the prompt has overtaken
      another or requests decode: splitting the prompt would make the decodes wait for more invocations.
    - A prompt that one invocation completes may overtake older prompts, but not in two invocations in a row.
      A short prompt then does not wait for a long one, and the long one gets every other invocation.
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
        """Maximum tokens of a task; None if a task may be a full prompt."""
        return self._chunk_tokens if self.budget is None else max(self._stride, self.budget.most)

    @property
    def max_tokens_beside_decodes(self) -> int:
        """Maximum tokens of an invocation while requests decode; without a budget, one chunk or one page."""
        return self.budget.while_decoding if self.budget else self._chunk_tokens or self._stride

    def next_tasks(self, prefills: Sequence[Request], num_decodes: int) -> list[LlmTaskInput]:
        """Select the tasks of the next invocation while `num_decodes` requests decode.

        `prefills` must be non-empty, oldest first.
        """
        if self.budget is None:
            return self._equal_chunks(prefills[0], prefills)
        budget, has_decodes = self.budget, num_decodes > 0
        tokens = budget.tokens(num_decodes, sum(request.num_unplanned for request in prefills))

        def max_pages(context: int, num_rows: int = 1) -> int:
            """Return the maximum pages of each of `num_rows` rows that start at `context` or before."""
            cost = budget.page_cost(context, has_decodes=has_decodes)
            return max(1, int(tokens / self._stride / (self._padded_rows(num_rows) * cost)))

        first = self._first(prefills, max_pages)
        single = LlmTaskInput.next_of(first, max_pages(first.num_planned) * self._stride)
        equal = self._equal_chunks(first, prefills)
        num_pages = self._num_pages(equal[0])
        contexts = enumerate(accumulate((task.start_position for task in equal), max), 1)
        counts = [n for n, context in contexts if n > 1 and num_pages <= max_pages(context, n)]
        several = equal[: max(filter(self._has_little_padding, counts), default=0)]
        if sum(len(task.token_ids) for task in several) < len(single.token_ids):
            return [single]
        is_cut = single.completes and not several[0].completes
        return [single] if is_cut and (has_decodes or self._overtook) else several

    def _first(self, prefills: Sequence[Request], max_pages: Callable[[int], int]) -> Request:
        """Return the oldest prompt, or one that overtakes it because a single invocation completes it."""
        oldest = prefills[0]
        ended = (r for r in prefills if r.num_unplanned <= max_pages(r.num_planned) * self._stride)
        short = next(ended, oldest)
        self._overtook = short is not oldest and not self._overtook
        return short if self._overtook else oldest

    def _equal_chunks(self, first: Request, prefills: Sequence[Request]) -> list[LlmTaskInput]:
        """Return the chunk of `first` and the equal chunks of other prompts, up to the largest batch size."""
        requests = (first, *(r for r in prefills if r is not first))
        tasks = [LlmTaskInput.next_of(r, self._chunk_tokens or len(r.token_ids)) for r in requests]
        pages = self._num_pages(tasks[0])
        return [task for task in tasks if self._num_pages(task) == pages][: self._row_buckets[-1]]

    def _has_little_padding(self, num_rows: int) -> bool:
        """Return whether at most a quarter of the rows are padding, or the smallest batch size is used."""
        rows = self._padded_rows(num_rows)
        return rows == self._row_buckets[0] or 4 * num_rows >= 3 * rows

    def _padded_rows(self, num_rows: int) -> int:
        return self._row_buckets[bisect_left(self._row_buckets, num_rows)]

    def _num_pages(self, task: LlmTaskInput) -> int:
        return -(-len(task.token_ids) // self._stride)
