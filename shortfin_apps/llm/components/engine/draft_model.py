"""Draft model: a smaller model on the same device proposes tokens, which the main model verifies.

    step n      the main model samples t for a request
    step n + 1  the draft model runs two rounds: it computes t and samples x, then computes x and samples y.
                A round is one invocation for all requests that get drafts.
                The main model computes t, x and y, one row each (speculation.py).

All rounds are queued at once, and the main model's invocation after them. The draft model's program draws
the tokens into the main model's table on the device (abi.py), where the next round and the main model's
program read them.

The draft model has its own page table, with a lease for each request that it drafts for, and shares prefixes
as the main model does. In the first round of a step, it catches up on each request's tokens that it has not
computed; initially, these are the prompt. The catch-up is limited to a number of tokens per step: a long
prompt takes several steps, and the request gets no drafts until then. Rejected tokens are dropped, and their
cache slots are overwritten. A request gets no drafts if it has too few pages, or if its context is exhausted
or its logits are not finite.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftOptions, Queued
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import DrawLaunch
from shortfin_apps.llm.components.invocation.slot_tables import SlotTables
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request, State
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.contract.abi import EntryFamily, Layout, SamplingField

CATCH_UP_TOKENS = 256  # over all requests in one step


@dataclass(slots=True, eq=False)
class _Sequence:
    """The draft model's state for one request.

    The draft model's KV cache holds the request's first `num_computed` tokens, followed by the drafted tokens
    `ahead`. `fields` are for draws on the device.
    """

    lease: Lease
    num_computed: int
    fields: array[int]
    ahead: list[int] = field(default_factory=list)


class DraftModel(Drafter):
    """Drafts tokens for an engine's requests. Owns the leases of `cache`.

    `tables` are those of the main model. `catch_up_tokens`: maximum tokens to catch up on in a step, over all
    requests.
    """

    NAME = "draft model"

    def __init__(
        self,
        runner: BatchRunner,
        cache: KVCache,
        options: DraftOptions,
        tables: SlotTables,
        catch_up_tokens: int = CATCH_UP_TOKENS,
    ) -> None:
        super().__init__(runner, cache, options)
        self._tables = tables
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
        """Draft round by round; the first one catches up on uncomputed tokens."""
        self._runner.slots.use_tokens_of(self._tables)
        tasks, left = [], self._catch_up_tokens
        for request, count in wanted.items():
            if left and (sequence := self._ready(request, count)) is not None:
                end = min(len(request.token_ids), sequence.num_computed + left)
                left -= end - sequence.num_computed
                tasks += self._tasks(request, sequence.num_computed, end)
        drafted: dict[Request, list[int]] = defaultdict(list)
        number = 0
        while tasks:
            for request, token_id in self._queue(tasks).items():
                drafted[request].append(token_id)
            number += 1
            going = [r for r, tokens in drafted.items() if len(tokens) == number < wanted[r]]
            tasks = [self._task(r, drafted[r][-1:], len(r.token_ids) + number - 1) for r in going]
        if self._queued and not drafted:  # no batch has proposed tokens, so none would wait
            self._drawn(self._queued)
            self._queued.clear()
            self._failures = 0
        return drafted

    def _queue(self, tasks: Sequence[LlmTaskInput]) -> dict[Request, int]:
        """Queue an invocation of the tasks; return the next token of each request that is caught up."""
        slots = self._runner.slots
        places = [
            slots.drafted_place(task.request.slot, task.seq_len) if _is_caught_up(task) else -1
            for task in tasks
        ]
        launch = self._runner.launch(Batch(EntryFamily.EXTEND, tuple(tasks)), self._fields, places)
        self._queued.append(launch)
        if launch.shape.layout is not Layout.LOOP:
            rows = range(len(tasks))
            self._queued.extend(self._runner.launch_draws(launch, rows, self._fields, slots=places))
        pairs = zip(tasks, places, strict=True)
        return {task.request: -1 - place for task, place in pairs if place >= 0}

    def _drawn(self, queued: Sequence[Queued]) -> Mapping[Request, Sequence[int]]:
        drafted: dict[Request, list[int]] = defaultdict(list)
        for task, token_id in self._computed(queued):
            if self._note(task, is_finite=token_id >= 0):
                drafted[task.request].append(token_id)
        for request, tokens in drafted.items():
            if (sequence := self._sequences.get(request)) is not None:
                sequence.ahead = tokens[:-1]
        return drafted

    def _computed(self, queued: Sequence[Queued]) -> Iterator[tuple[LlmTaskInput, int]]:
        """Wait for invocations; yield each task with the token that the device drew, -1 for none."""
        tasks: Sequence[LlmTaskInput] = ()
        for each in queued:
            if isinstance(each, DrawLaunch):
                yield from zip([tasks[row] for row in each.rows], self._runner.drawn(each), strict=True)
            else:
                tasks = each.batch.tasks
                yield from zip(tasks, self._runner.wait(each) or (), strict=False)

    def _fields(self, request: Request) -> array[int]:
        return self._sequences[request].fields

    def _note(self, task: LlmTaskInput, *, is_finite: bool) -> bool:
        """Note that a task is computed, and publish full pages; return whether its row drafts a token.

        If the row is not finite, the request is forgotten, and its later rows draft nothing.
        """
        request = task.request
        if (sequence := self._sequences.get(request)) is None:
            return False
        if not is_finite:
            self._cache.retract(sequence.lease)
            self._forget(request, is_suspect=True)
            return False
        if task.seq_len <= len(request.token_ids):
            sequence.num_computed = task.seq_len
            self._cache.publish(sequence.lease, request.token_ids, task.seq_len)
        return _is_caught_up(task)

    def _tasks(self, request: Request, start: int, end: int) -> list[LlmTaskInput]:
        """Create tasks for tokens `start` to `end`: single tokens up to a page boundary, then a chunk."""
        begin = min(end, -(-start // self._cache.stride) * self._cache.stride)
        cuts = [*range(start, begin), begin] + ([end] if begin < end else [])
        return [self._task(request, request.token_ids[a:b], a) for a, b in pairwise(cuts)]

    def _ready(self, request: Request, count: int) -> _Sequence | None:
        """Return the request's sequence with pages for `count` drafted tokens; None if pages are too few."""
        if (sequence := self._sequences.get(request)) is None:
            lease = self._cache.acquire(request.token_ids, request.call.cache_salt)
            sequence = _Sequence(lease, lease.num_cached_tokens, self._new_fields(request))
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

    def _new_fields(self, request: Request) -> array[int]:
        num_candidates = self._runner.num_candidates
        fields = sampling_fields(request, num_candidates, draws_rows=True)
        fields[SamplingField.TOP_K] = min(fields[SamplingField.TOP_K], num_candidates)
        return fields

    def _task(self, request: Request, token_ids: Sequence[int], start: int) -> LlmTaskInput:
        lease = self._sequences[request].lease
        end = start + len(token_ids)
        return LlmTaskInput(request, token_ids, start, end, lease.page_ids, lease.window_page_ids)

    def _forget(self, request: Request, *, is_suspect: bool = False) -> None:
        lease = self._sequences.pop(request).lease
        lease.is_suspect |= is_suspect
        self._cache.release(lease)

    def _fail(self) -> None:
        """Forget every request, because the failed invocation may have written anything to their pages."""
        self._runner.forget_state()
        for request in list(self._sequences):
            self._forget(request, is_suspect=True)


def _is_caught_up(task: LlmTaskInput) -> bool:
    """Return whether the task computes the request's last token, or a drafted one after it."""
    return task.seq_len >= len(task.request.token_ids)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
