"""Reads the result rows of a batch: tokens that the device draws, else candidates or logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_result import BatchResult
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates, Drawn
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.components.sampling.sampler import Sampler

# One row per task of a batch: an int is the ID of a token that the device drew, or -1 if the row is not
# finite, and Drawn such a token of which the host reports more; None if nothing was fetched for the task.
Row = Candidates | Drawn | int | None
Rows = Sequence[Row]


def is_finite(row: Candidates | Drawn | int) -> bool:
    return row >= 0 if isinstance(row, int) else row.is_finite


class RowReader:
    """Fetches only as much of a batch's result as is needed to choose the next tokens."""

    def __init__(self, runner: BatchRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._edits: dict[int, RowEdits] = {}  # of the running batch, by row; prepared rows only

    def prepare(self, batch: Batch, unread: Collection[int]) -> None:
        """While the device runs the batch, precompute what `rows` needs for the rows `unread`.

        Skips requests for which several rows yield tokens, because a grammar caches allowed tokens for one
        position only.
        """
        num_rows = Counter(task.request for task in batch.tasks if task.completes)
        self._edits = {
            index: edits
            for index, task in enumerate(batch.tasks)
            if index in unread
            and task.completes
            and num_rows[task.request] == 1
            and (edits := self._sampler.prepare(task.request)) is not None
        }

    def rows(self, launch: Launch, unread: Collection[int]) -> Rows:
        """Read the rows `unread` of the batch, which must be the last one. Raises InvocationError."""
        batch, result = launch.batch, self._runner.result(launch)
        chosen = self._drawn(launch, unread)
        unsure = [
            index
            for index, task in enumerate(batch.tasks)
            if index in unread and task.completes and self._sampler.needs_logits(task.request, task.num_ahead)
        ]
        for_token = [i for i in unsure if batch.tasks[i].request.call.params.logprobs is None]
        chosen |= self._decided(batch, result, for_token)
        chosen |= self._drawn_adjusted(launch, result, [i for i in for_token if i not in chosen])
        chosen = {index: self._told(batch, result, index, drawn) for index, drawn in chosen.items()}
        return [
            chosen.get(index) or self._row(task, result, index, with_logits=index in unsure)
            if index in unread
            else None
            for index, task in enumerate(batch.tasks)
        ]

    def _drawn(self, launch: Launch, unread: Collection[int]) -> dict[int, Drawn]:
        """Return the rows for which the device draws the token from all logits, without adjustments."""
        if not self._runner.buckets.draws_rows:
            return {}
        rows = [
            index
            for index, task in enumerate(launch.batch.tasks)
            if index in unread
            and task.completes
            and self._sampler.is_drawn_from_row(task.request, task.num_ahead)
        ]
        return self._draw(launch, rows)

    def _decided(self, batch: Batch, result: BatchResult, unsure: Sequence[int]) -> dict[int, Drawn]:
        """Return those `unsure` rows (which may need logits) whose candidates suffice to choose the token."""
        if not self._runner.num_candidates:
            return {}
        decided, ahead = {}, _proposed_before(batch)
        for index in unsure:
            row = result.row(index, with_logits=False)
            drawn = self._sampler.decided(row, batch.tasks[index].request, ahead[index])
            if drawn is not None:
                decided[index] = drawn
        return decided

    def _drawn_adjusted(self, launch: Launch, result: BatchResult, unsure: Sequence[int]) -> dict[int, Drawn]:
        """Return those `unsure` rows for which the device draws the token from adjusted logits.

        Omits a row with finite logits but no allowed token: `Sampler.sample` will report the reason.
        """
        rows: list[int] = []
        drawn_edits: list[RowEdits] = []
        for index in unsure:
            task = launch.batch.tasks[index]
            edits = self._edits.get(index)
            if edits is None and not task.num_ahead:
                edits = self._sampler.row_edits(task.request)
            if edits is not None:
                rows.append(index)
                drawn_edits.append(edits)
        drawn = self._draw(launch, rows, drawn_edits)
        return {
            index: token
            for index, token in drawn.items()
            if token.is_finite or not result.row(index, with_logits=False).is_finite
        }

    def _draw(self, launch: Launch, rows: Sequence[int], edits: Sequence[RowEdits] = ()) -> dict[int, Drawn]:
        token_ids = self._runner.draw(launch, rows, self._sampler.device_fields, edits)
        return {row: Drawn(token_id) for row, token_id in zip(rows, token_ids, strict=True)}

    def _told(self, batch: Batch, result: BatchResult, index: int, drawn: Drawn) -> Drawn:
        """Return the drawn token, with its logit if the request asks for logits.

        All logits are fetched only if the token is not a candidate.
        """
        if not batch.tasks[index].request.call.params.chosen_logits or not drawn.is_finite:
            return drawn
        logit = result.row(index, with_logits=False).logit_of(drawn.token_id)
        if logit is None:
            logit = result.row(index, with_logits=True).logit_of(drawn.token_id)
        return drawn._replace(logit=logit)

    def _row(
        self, task: LlmTaskInput, result: BatchResult, index: int, *, with_logits: bool
    ) -> Candidates | None:
        """Return a task's row; if it yields no token, only its candidates, to check them for NaN.

        Returns None for a row that yields no token and has no candidates.
        """
        if not task.completes and not self._runner.num_candidates:
            return None
        return result.row(index, with_logits)


def _proposed_before(batch: Batch) -> list[Sequence[int]]:
    """Return for each task the proposed tokens of its request, up to and including the task's own."""
    proposed: dict[Request, list[int]] = {}
    before: list[Sequence[int]] = []
    for task in batch.tasks:
        if task.num_ahead:
            proposed.setdefault(task.request, []).extend(task.token_ids)
        before.append(proposed.get(task.request, ())[: task.num_ahead])
    return before
