"""Which chunks of which prompts a prefill invocation of the default mode computes.

Chunks are the same size when they fill the same number of pages: a last chunk of 122 tokens runs beside one
of 128 (8 pages of 16 both), a chunk of 44 does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request


class FixedChunks:
    """Every chunk has `chunk_tokens` but a prompt's last; None stands for whole prompts.

    The oldest prompt's chunk runs, with those of others that are of the same size, as many as there are rows.
    """

    def __init__(self, *, stride: int, chunk_tokens: int | None, row_buckets: Sequence[int]) -> None:
        assert chunk_tokens is None or (chunk_tokens > 0 and chunk_tokens % stride == 0)
        self._stride = stride
        self._chunk_tokens = chunk_tokens
        self._row_buckets = sorted(row_buckets)

    def all_tasks(self, request: Request) -> list[LlmTaskInput]:
        """What is left of a request, in chunks."""
        total = len(request.tokens)
        chunk = self._chunk_tokens or max(total, 1)
        return [_task(request, start, chunk) for start in range(request.num_computed, total, chunk)]

    def next_tasks(self, prefills: Sequence[Request], has_decodes: bool) -> list[LlmTaskInput]:
        """The next invocation's, of at least one prompt, oldest first."""
        del has_decodes
        return self._same_size(prefills[0], prefills)

    def _same_size(self, first: Request, prefills: Sequence[Request]) -> list[LlmTaskInput]:
        """The chunk of `first`, and others' of as many pages, as long as there are rows."""
        tasks = [self._chunk(r) for r in (first, *(r for r in prefills if r is not first))]
        pages = self._num_pages(tasks[0])
        return [task for task in tasks if self._num_pages(task) == pages][: self._row_buckets[-1]]

    def _chunk(self, request: Request) -> LlmTaskInput:
        return _task(request, request.num_computed, self._chunk_tokens or len(request.tokens))

    def _num_pages(self, task: LlmTaskInput) -> int:
        return -(-len(task.input_tokens) // self._stride)


class BudgetedChunks(FixedChunks):
    """Chunks that use up a token budget, padding rows included.

    Equal chunks run together, as many as the budget holds, where at most a quarter of the rows is padding. A
    prompt that has more tokens than they have together takes as much of the budget as it can instead: fewer
    and longer chunks are the same work in fewer readings of the weights. So does one that this finishes, if
    it overtook or beside streams, where cutting prompts to share invocations would make more of them.

    A prompt that would be done with this invocation may go before older ones, but not twice in a row: so a
    short prompt need not wait for a long one, which still gets every other invocation.
    """

    def __init__(
        self, *, stride: int, chunk_tokens: int, row_buckets: Sequence[int], budget: TokenBudget
    ) -> None:
        super().__init__(stride=stride, chunk_tokens=chunk_tokens, row_buckets=row_buckets)
        self._budget = budget
        self._overtook = False

    def next_tasks(self, prefills: Sequence[Request], has_decodes: bool) -> list[LlmTaskInput]:
        first = self._first(prefills, has_decodes)
        room = self._page_room(first, 1, has_decodes)
        alone = _task(first, first.num_computed, room * self._stride)
        together = self._together(first, prefills, has_decodes)
        if not together or sum(len(task.input_tokens) for task in together) < len(alone.input_tokens):
            return [alone]
        is_cut = alone.completes and not together[0].completes
        return [alone] if is_cut and (has_decodes or self._overtook) else together

    def _together(self, first: Request, prefills: Sequence[Request], has_decodes: bool) -> list[LlmTaskInput]:
        """Several chunks of a size, or nothing."""
        tasks = self._same_size(first, prefills)
        counts = [n for n in range(2, len(tasks) + 1) if self._is_filled(n)]
        return tasks[: max((n for n in counts if self._holds(tasks[:n], has_decodes)), default=0)]

    def _is_filled(self, num_rows: int) -> bool:
        """Whether at most a quarter of the rows is padding, or no fewer rows were compiled."""
        rows = self._padded_rows(num_rows)
        return rows == self._row_buckets[0] or 4 * num_rows >= 3 * rows

    def _padded_rows(self, num_rows: int) -> int:
        return next(rows for rows in self._row_buckets if rows >= num_rows)

    def _first(self, prefills: Sequence[Request], has_decodes: bool) -> Request:
        """The oldest prompt, or one that may overtake it."""
        oldest = prefills[0]
        short = next((r for r in prefills if self._ends_alone(r, has_decodes)), oldest)
        self._overtook = short is not oldest and not self._overtook
        return short if self._overtook else oldest

    def _ends_alone(self, request: Request, has_decodes: bool) -> bool:
        return request.num_uncomputed <= self._page_room(request, 1, has_decodes) * self._stride

    def _holds(self, tasks: Sequence[LlmTaskInput], has_decodes: bool) -> bool:
        room = min(self._page_room(task.request, len(tasks), has_decodes) for task in tasks)
        return self._num_pages(tasks[0]) <= room

    def _page_room(self, request: Request, num_rows: int, has_decodes: bool) -> int:
        """Pages of the budget for each row when so many run, the request among them; at least one."""
        cost = self._padded_rows(num_rows) * self._budget.page_cost(request.num_computed, has_decodes)
        return max(1, int(self._budget.tokens(has_decodes) / self._stride / cost))


def _task(request: Request, start: int, length: int) -> LlmTaskInput:
    end = min(start + length, len(request.tokens))
    return LlmTaskInput(request, request.tokens[start:end], start, end, request.page_ids)
