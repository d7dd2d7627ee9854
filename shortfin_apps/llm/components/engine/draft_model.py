"""Draft model: a smaller model on the same device proposes tokens, which the main model verifies.

    step n      the main model samples t for a request
    step n + 1  the draft model runs two rounds: it computes t and samples x, then computes x and samples y.
                A round is one invocation for all requests that get drafts.
                The main model computes t, x and y, one row each (speculation.py).

The draft model has its own page table, with a lease for each request that it drafts for, and shares prefixes
as the main model does. In the first round of a step, it catches up on each request's tokens that it has not
computed; initially, these are the prompt. The catch-up is limited to a number of tokens per step: a long
prompt takes several steps, and the request gets no drafts until then. Rejected tokens are dropped, and their
cache slots are overwritten. A request gets no drafts if it has too few pages, or if its context is exhausted
or its logits are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftOptions
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request, State
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.sampler import drafted_token
from shortfin_apps.llm.contract.abi import EntryFamily

CATCH_UP_TOKENS = 256  # over all requests in one step


@dataclass(slots=True, eq=False)
class _Sequence:
    """The draft model's state for one request.

    The draft model's KV cache holds the request's first `num_computed` tokens, followed by the drafted tokens
    `ahead`.
    """

    lease: Lease
    num_computed: int
    ahead: list[int] = field(default_factory=list)


class DraftModel(Drafter):
    """Drafts tokens for an engine's requests. Owns the leases of `cache`.

    `catch_up_tokens`: maximum tokens to catch up on in a step, over all requests.
    """

    NAME = "draft model"

    def __init__(
        self,
        runner: BatchRunner,
        cache: KVCache,
        options: DraftOptions,
        catch_up_tokens: int = CATCH_UP_TOKENS,
    ) -> None:
        super().__init__(runner, cache, options)
        self._catch_up_tokens = catch_up_tokens
        self._sequences: dict[Request, _Sequence] = {}

    def forget_ended(self) -> None:
        """Release the pages of requests that no longer run."""
        super().forget_ended()
        for request in [r for r in self._sequences if r.state is not State.RUNNING]:
            self._forget(request)

    def flush_cache(self) -> None:
        self._cache.flush()

    def _rounds(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Draft round by round; the host samples the tokens of each round before the next one."""
        drafted = self._first_round(wanted)
        for number in range(1, max(wanted.values(), default=0)):
            going = [r for r, tokens in drafted.items() if len(tokens) == number < wanted[r]]
            if not going:
                break
            tasks = [self._task(r, drafted[r][-1:], len(r.token_ids) + number - 1) for r in going]
            for request, row in zip(going, self._run(tasks), strict=True):
                if self._is_finite(request, row):
                    drafted[request] += self._next(request, row, number)
        self._failures = 0
        for request, tokens in drafted.items():
            if (sequence := self._sequences.get(request)) is not None:
                sequence.ahead = tokens[:-1]
        return drafted

    def _first_round(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Catch up on uncomputed tokens, then draft one token for each request that is caught up."""
        tasks, left = [], self._catch_up_tokens
        for request, count in wanted.items():
            if left and (sequence := self._ready(request, count)) is not None:
                end = min(len(request.token_ids), sequence.num_computed + left)
                left -= end - sequence.num_computed
                tasks += self._tasks(request, sequence.num_computed, end)
        drafted: dict[Request, list[int]] = {}
        for task, row in zip(tasks, self._run(tasks), strict=True):
            if self._is_finite(task.request, row) and self._advance(task):
                drafted[task.request] = self._next(task.request, row, 0)
        return drafted

    def _next(self, request: Request, row: Candidates, num_ahead: int) -> list[int]:
        """Return a list of the token that `row` yields; empty if the main model's vocabulary lacks the token.

        `num_ahead` is the number of tokens drafted before.
        """
        token_id, vocab_size = drafted_token(row, request, num_ahead), self._options.vocab_size
        return [token_id] if vocab_size is None or token_id < vocab_size else []

    def _tasks(self, request: Request, start: int, end: int) -> list[LlmTaskInput]:
        """Create tasks for tokens `start` to `end`: single tokens up to a page boundary, then a chunk."""
        begin = min(end, -(-start // self._cache.stride) * self._cache.stride)
        cuts = [*range(start, begin), begin] + ([end] if begin < end else [])
        return [self._task(request, request.token_ids[a:b], a) for a, b in pairwise(cuts)]

    def _ready(self, request: Request, count: int) -> _Sequence | None:
        """Return the request's sequence with pages for `count` drafted tokens; None if pages are too few."""
        if (sequence := self._sequences.get(request)) is None:
            lease = self._cache.acquire(request.token_ids, request.call.cache_salt)
            sequence = _Sequence(lease, lease.num_cached_tokens)
            self._sequences[request] = sequence
        known = request.token_ids[sequence.num_computed :]
        sequence.num_computed += min(_common(sequence.ahead, known), len(known) - 1)
        sequence.ahead = []
        num_tokens = len(request.token_ids) + count
        num_next = sequence.num_computed + self._catch_up_tokens + count
        if self._cache.reserve(sequence.lease, num_tokens, min(num_tokens, num_next)):
            return sequence
        self._forget(request)
        return None

    def _advance(self, task: LlmTaskInput) -> bool:
        """Mark the task's tokens as computed and publish pages; return whether the request is caught up."""
        sequence = self._sequences[task.request]
        sequence.num_computed = task.seq_len
        self._cache.publish(sequence.lease, task.request.token_ids, task.seq_len)
        return task.seq_len == len(task.request.token_ids)

    def _is_finite(self, request: Request, row: Candidates) -> bool:
        """Return whether this and earlier rows of the request are finite; if not, forget the request."""
        if row.is_finite or request not in self._sequences:
            return request in self._sequences
        self._cache.retract(self._sequences[request].lease)
        self._forget(request, is_suspect=True)
        return False

    def _task(self, request: Request, token_ids: Sequence[int], start: int) -> LlmTaskInput:
        lease = self._sequences[request].lease
        end = start + len(token_ids)
        return LlmTaskInput(request, token_ids, start, end, lease.page_ids, lease.window_page_ids)

    def _run(self, tasks: Sequence[LlmTaskInput]) -> list[Candidates]:
        if not tasks:
            return []
        decodes = self._runner.buckets.holds_decodes(len(tasks)) and all(len(t.token_ids) == 1 for t in tasks)
        family = EntryFamily.DECODE if decodes else EntryFamily.EXTEND
        result = self._runner.run(Batch(family, tuple(tasks)))
        with_logits = not self._runner.num_candidates
        return [result.row(index, with_logits=with_logits) for index in range(len(tasks))]

    def _forget(self, request: Request, *, is_suspect: bool = False) -> None:
        lease = self._sequences.pop(request).lease
        lease.is_suspect |= is_suspect
        self._cache.release(lease)

    def _fail(self) -> None:
        """Forget every request, because the failed invocation may have written anything to their pages."""
        for request in list(self._sequences):
            self._forget(request, is_suspect=True)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
