"""Draft layer: the model's own extra layer proposes tokens (model/draft_layer.py).

    step n      the main model computes s at position p - 1 and samples t. Its entry also stores the draft
                layer's keys and values of s, and keeps the hidden state of s.
    step n + 1  the draft layer runs two rounds: from the hidden state of s and t, it samples x; from its own
                result and x, it samples y.
                The main model computes t, x and y, one row each (speculation.py). Its entry overwrites the
                draft layer's keys and values of these, and the hidden states.

The draft layer uses the pages of the main model's leases: there is nothing to catch up on, and shared
prefixes are shared with it. If the hidden state before a request's first computed token is unknown, as after
a shared prefix, zeros stand for it: the first draft may then be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import Drafter
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.contract.abi import EntryFamily


class DraftLayer(Drafter):
    """Drafts tokens for an engine's requests, with the `draft` entries of the main model's program."""

    NAME = "draft layer"

    def num_worth(self, request: Request, least: float, most: int) -> int:
        """Draft nothing while other known tokens than the last have to be computed, as after forced ones."""
        is_behind = request.num_planned < len(request.token_ids) - 1
        return 0 if is_behind else super().num_worth(request, least, most)

    def flush_cache(self) -> None:
        """Do nothing: the pages are the main model's."""

    def _first_round(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        tasks = [self._task(r, r.token_ids[-1:], len(r.token_ids) - 1) for r in wanted]
        rows = zip(wanted, self._run(tasks), strict=True)
        return {request: self._next(request, row, 0) for request, row in rows if row.is_finite}

    def _task(self, request: Request, token_ids: Sequence[int], start: int) -> LlmTaskInput:
        lease = request.lease
        assert lease is not None, "it runs"
        end = start + len(token_ids)
        return LlmTaskInput(request, token_ids, start, end, lease.page_ids, lease.window_page_ids)

    def _run(self, tasks: Sequence[LlmTaskInput]) -> list[Candidates]:
        rows: list[Candidates] = []
        most, with_logits = self._runner.buckets.most_drafts, not self._runner.num_candidates
        for first in range(0, len(tasks), most):
            part = tuple(tasks[first : first + most])
            result = self._runner.run(Batch(EntryFamily.DRAFT, part))
            rows += [result.row(index, with_logits=with_logits) for index in range(len(part))]
        return rows

    def _is_finite(self, request: Request, row: Candidates) -> bool:
        return row.is_finite

    def _fail(self) -> None:
        self._runner.forget_state()
