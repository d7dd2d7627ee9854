"""Flight recorder: a bounded ring of the last minute's invocations, to replay them after a fault.

    engine's thread      run, step, draw, logprobs, clear, turn  ──>  ring of records
    any thread           recording  ──>  a copy

A record is created before its invocation is queued, so a device that never answers leaves a record without an
end time. A record also contains the block table changes since the previous record; a change appends pages to
a request's table or replaces the table. The recorder keeps each request's tables as of the first record in
the ring (its base tables). When a record leaves the ring, its changes are applied to the base tables.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.recorder.records import (
    Array,
    Clear,
    Draw,
    Invocation,
    KnownRequest,
    LastLaunch,
    Logprobs,
    Loop,
    Pages,
    Recorded,
    Run,
    Step,
    Task,
    Turn,
)
from shortfin_apps.llm.components.recorder.row_checks import Fetched
from shortfin_apps.llm.components.request.request import Request

SECONDS = 60.0
MAX_BYTES = 32 << 20
# Approximate memory sizes of objects, in bytes.
_RECORD_BYTES, _TASK_BYTES, _REQUEST_BYTES, _ID_BYTES = 400, 150, 600, 8
_EVICTIONS_PER_PURGE = 64
# A purge visits all requests. With many requests, a purge after each evicted record would stop the engine for
# long; therefore it comes only after at least one eviction per 64 requests.
_LOOKS_PER_EVICTION = 64
# Candidates larger than this are checksummed immediately, which takes longer than all other recording,
# because a model step evicts the data from the CPU's caches. Smaller candidates are kept, and checksummed
# only for a dump; candidates of a few rows fit into the recorder for a minute.
_MOST_KEPT_BYTES = 16 << 10
_MOST_ERROR_CHARS = 2_000


class Recording(NamedTuple):
    """A copy of the recorder's content.

    Records of invocations in flight are shared with the recorder, which completes them. `unsummed` are
    candidates that are not checksummed yet, by record number.
    """

    requests: Sequence[KnownRequest]
    loops: Sequence[Loop]
    records: Sequence[Recorded]
    unsummed: Mapping[int, Fetched] = MappingProxyType({})

    def last_launch(self, now_s: float) -> LastLaunch | None:
        """Describe the invocation at which the device stopped, or else the last one; see LastLaunch."""
        launches = [each for each in self.records if not isinstance(each, Turn)]
        last = None
        for index, launch in enumerate(launches):
            state = _state_of(launch)
            if last is None or last.state == "done" or state == "done":
                rows, tokens = self._counts(launch)
                last = LastLaunch(
                    number=launch.number,
                    entry="clear pages" if isinstance(launch, Clear) else launch.entry,
                    rows=rows,
                    tokens=tokens,
                    age_s=now_s - launch.began_s,
                    state=state,
                    num_queued=len(launches) - 1 - index,
                )
        return last

    def _counts(self, launch: Run | Step | Draw | Logprobs | Clear) -> tuple[int, int]:
        """Return the rows of a launch and the tokens that it computes; for Clear, the pages and 0."""
        if isinstance(launch, Run):
            return len(launch.tasks), sum(len(task.token_ids) for task in launch.tasks)
        if isinstance(launch, Step):
            num_rows = next(len(loop.tasks) for loop in self.loops if loop.number == launch.loop)
            return num_rows, num_rows
        if isinstance(launch, Clear):
            return len(launch.page_ids) + len(launch.window_page_ids), 0
        return (launch.num_draws if isinstance(launch, Draw) else launch.num_rows), 0

    def settle(self) -> None:
        """Write the checksums of `unsummed` candidates into their records; takes milliseconds."""
        for record in self.records:
            if isinstance(record, Run) and (candidates := self.unsummed.get(record.number)) is not None:
                candidates.note(record)


def _state_of(launch: Invocation) -> Literal["running", "failed", "done"]:
    if launch.ended_s is None:
        return "running"
    return "done" if launch.error is None else "failed"


class _Seen:
    """A request in the ring: its block tables as of its last record, and as of the ring's first record."""

    __slots__ = (
        "arrival_s",
        "base",
        "last",
        "num_pages",
        "num_prompt_tokens",
        "num_window_pages",
        "number",
        "page_ids",
        "request_id",
        "size",
        "token_ids",
        "window_base",
        "window_page_ids",
        "window_table",
    )

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.last = 0  # number of the request's last record
        self.request_id = request.request_id
        self.arrival_s = request.arrival_s
        self.num_prompt_tokens = len(request.call.prompt_token_ids)
        # The request's own list. A reference to the request itself would keep its grammar alive.
        self.token_ids = request.token_ids
        self.page_ids: Sequence[int] | None = None  # the lease's own list
        self.window_page_ids: Sequence[int] | None = None
        self.num_pages = self.num_window_pages = 0
        self.window_table: list[int] = []  # a copy, as accepted states replace pages in the middle
        self.base: list[int] = []
        self.window_base: list[int] = []
        tokens = self.num_prompt_tokens + request.call.params.max_tokens
        self.size = _REQUEST_BYTES + _ID_BYTES * tokens

    def is_behind(self, page_ids: Sequence[int]) -> bool:
        """Return whether the request's tables may have changed since its last record.

        Always True for a request with a window table.
        """
        return (
            page_ids is not self.page_ids
            or len(page_ids) != self.num_pages
            or self.window_page_ids is not None
        )

    def known(self) -> KnownRequest:
        has_windows = self.window_page_ids is not None
        return KnownRequest(
            self.number,
            self.request_id,
            self.arrival_s,
            self.num_prompt_tokens,
            tuple(self.token_ids),
            tuple(self.base),
            tuple(self.window_base) if has_windows else None,
        )


class FlightRecorder:
    """Keeps the records of the last `seconds`, or fewer if these exceed about `max_bytes`.

    Only the engine's thread may add records. Any thread may call `recording`, even while the engine's thread
    waits for a device that does not answer. The engine calls `on_fault` after a fault.
    """

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.on_fault: Callable[[str], None] = lambda reason: None
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards all attributes below; never held during a device call
        self._ring: deque[Recorded] = deque()
        self._seen: dict[int, _Seen] = {}  # by `id` of the request's list of tokens, which _Seen keeps alive
        self._by_number: dict[int, _Seen] = {}
        self._loops: dict[int, Loop] = {}
        self._unsummed: dict[int, Fetched] = {}  # candidates by record number
        self._num_records = self._num_requests = self._num_loops = 0
        self._num_evicted = 0  # since the last purge
        self._in_loop: tuple[Loop, list[_Seen]] | None = None  # the last decode loop and its requests
        self.num_bytes = 0

    def run(self, entry: str, blocks: int, batch: Batch) -> Run:
        """Record a batch that is about to run. Callers must complete the record with `fetched` or `ended`."""
        with self._lock:
            record = Run(
                number=self._next_number(),
                began_s=self.clock(),
                entry=entry,
                family=batch.family.value,
                blocks=blocks,
                tasks=(),
            )
            pages: list[Pages] = []
            record.tasks = [self._task(task, record.number, pages) for task in batch.tasks]
            num_ids = sum([len(task.token_ids) for task in batch.tasks])
            record.size = _RECORD_BYTES + _TASK_BYTES * len(batch.tasks) + _ID_BYTES * num_ids
            self._append(record, pages)
        return record

    def loop(self, tasks: Sequence[LlmTaskInput], sampling: Sequence[Sequence[int]]) -> Loop:
        """Record a decode loop, before its first step: decodes of these requests at consecutive positions."""
        with self._lock:
            self._num_loops += 1
            noted = [
                Task(self._seen_of(task.request).number, task.start_position, task.token_ids)
                for task in tasks
            ]
            loop = self._loops[self._num_loops] = Loop(
                self._num_loops, noted, [tuple(map(int, fields)) for fields in sampling]
            )
            self.num_bytes += _size_of_loop(loop)
        return loop

    def step(self, entry: str, loop: Loop, index: int, requests: Sequence[Request]) -> Step:
        """Record a step of a decode loop that is about to be queued."""
        with self._lock:
            number = self._next_number()
            record = Step(number=number, began_s=self.clock(), entry=entry, loop=loop.number, index=index)
            pages: list[Pages] = []
            for seen, request in zip(self._seen_in(loop, requests), requests, strict=True):
                seen.last = number
                page_ids = request.page_ids
                if seen.is_behind(page_ids):
                    self._note(seen, page_ids, request.window_page_ids, pages)
            record.size = _RECORD_BYTES + _ID_BYTES * len(requests)
            self._append(record, pages)
        return record

    def draw(self, entry: str, arguments: Mapping[str, npt.NDArray[Any]], num_draws: int) -> Draw:
        """Record an entry that is about to draw tokens from existing rows on the device."""
        held = _held(arguments)
        with self._lock:
            record = Draw(
                number=self._next_number(),
                began_s=self.clock(),
                entry=entry,
                arguments=held,
                num_draws=num_draws,
            )
            record.size = _size_of_arrays(held)
            self._append(record, ())
        return record

    def logprobs(self, entry: str, arguments: Mapping[str, npt.NDArray[Any]], num_rows: int) -> Logprobs:
        """Record an entry that is about to compute terms of existing rows on the device."""
        held = _held(arguments)
        with self._lock:
            record = Logprobs(
                number=self._next_number(),
                began_s=self.clock(),
                entry=entry,
                arguments=held,
                num_rows=num_rows,
            )
            record.size = _size_of_arrays(held) + _ID_BYTES * num_rows
            self._append(record, ())
        return record

    def clear(self, page_ids: Collection[int], window_page_ids: Collection[int]) -> Clear:
        """Record pages that are about to be zeroed."""
        with self._lock:
            record = Clear(
                number=self._next_number(),
                began_s=self.clock(),
                page_ids=tuple(page_ids),
                window_page_ids=tuple(window_page_ids),
            )
            record.size = _RECORD_BYTES + _ID_BYTES * (len(page_ids) + len(window_page_ids))
            self._append(record, ())
        return record

    def ended(self, record: Invocation, error: BaseException | None = None) -> None:
        """Complete a record. If there is no error, callers must have filled in the results."""
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARS]
        record.ended_s = self.clock()

    def fetched(self, record: Run, candidates: Fetched | None) -> None:
        """Complete a batch's record. Small candidates are kept, and checksummed only for a dump."""
        if candidates is not None:
            num_bytes = candidates.num_bytes
            if num_bytes > _MOST_KEPT_BYTES:
                candidates.note(record)
            else:
                record.size += num_bytes
                self.num_bytes += num_bytes
                self._unsummed[record.number] = candidates
        record.ended_s = self.clock()

    def turn(
        self,
        began_s: float,
        *,
        num_running: int,
        num_waiting: int,
        num_preemptions: int,
        ended: Sequence[tuple[str, str]],
    ) -> None:
        """Record a finished step of the engine."""
        record = Turn(
            began_s=began_s,
            ended_s=self.clock(),
            num_running=num_running,
            num_waiting=num_waiting,
            num_preemptions=num_preemptions,
            ended=ended,
            size=_RECORD_BYTES + _TASK_BYTES * len(ended),
        )
        with self._lock:
            self._append(record, ())

    def recording(self) -> Recording:
        with self._lock:
            records = list(self._ring)
            numbers = {record.loop for record in records if isinstance(record, Step)}
            loops = [loop for number, loop in self._loops.items() if number in numbers]
            known = [seen.known() for seen in self._seen.values()]
            return Recording(known, loops, records, self._unsummed.copy())

    def _next_number(self) -> int:
        self._num_records += 1
        return self._num_records

    def _seen_of(self, request: Request) -> _Seen:
        seen = self._seen.get(id(request.token_ids))
        if seen is None:
            self._num_requests += 1
            seen = _Seen(self._num_requests, request)
            seen.last = self._num_records
            self._seen[id(seen.token_ids)] = self._by_number[seen.number] = seen
            self.num_bytes += seen.size
        return seen

    def _seen_in(self, loop: Loop, requests: Sequence[Request]) -> list[_Seen]:
        """Return the `_Seen` of each request; cached, because all steps of a loop have the same requests."""
        if self._in_loop is None or self._in_loop[0] is not loop:
            self._in_loop = loop, [self._seen_of(request) for request in requests]
        return self._in_loop[1]

    def _task(self, task: LlmTaskInput, number: int, pages: list[Pages]) -> Task:
        seen = self._seen_of(task.request)
        seen.last = number
        if seen.is_behind(task.page_ids):
            self._note(seen, task.page_ids, task.window_page_ids, pages)
        return Task(seen.number, task.start_position, task.token_ids, task.state_page_id)

    def _note(
        self, seen: _Seen, page_ids: Sequence[int], window_page_ids: Sequence[int] | None, pages: list[Pages]
    ) -> None:
        """Append the changes of a request's block tables since its last record to `pages`."""
        is_new = page_ids is not seen.page_ids
        if is_new or len(page_ids) != seen.num_pages:
            offset = 0 if is_new else seen.num_pages
            pages.append(Pages(seen.number, False, offset, tuple(page_ids[offset:])))
            seen.page_ids, seen.num_pages = page_ids, len(page_ids)
        if window_page_ids is None:
            return
        if window_page_ids is not seen.window_page_ids or len(window_page_ids) != seen.num_window_pages:
            offset = seen.num_window_pages
            if window_page_ids is not seen.window_page_ids:
                offset = 0 if is_new else _num_common(window_page_ids, seen.window_table)
            pages.append(Pages(seen.number, True, offset, tuple(window_page_ids[offset:])))
            seen.window_page_ids, seen.num_window_pages = window_page_ids, len(window_page_ids)
            seen.window_table[offset:] = window_page_ids[offset:]

    def _append(self, record: Recorded, pages: Sequence[Pages]) -> None:
        if pages and isinstance(record, Invocation):
            record.pages = pages
            record.size += sum([_TASK_BYTES + _ID_BYTES * len(each.page_ids) for each in pages])
        self._ring.append(record)
        self.num_bytes += record.size
        horizon_s = record.began_s - self._seconds
        while self._ring[0].began_s < horizon_s or (self.num_bytes > self._max_bytes and len(self._ring) > 1):
            self._evict()
        if self.num_bytes > self._max_bytes:
            self._purge()

    def _evict(self) -> None:
        """Drop the oldest record, and apply its block table changes to the base tables."""
        record = self._ring.popleft()
        self.num_bytes -= record.size
        if isinstance(record, Invocation):
            for each in record.pages:
                if (seen := self._by_number.get(each.request)) is not None:
                    table = seen.window_base if each.is_window else seen.base
                    table[each.offset :] = each.page_ids
        if isinstance(record, Step):
            self._drop_loops(record.loop)
        elif isinstance(record, Run):
            self._unsummed.pop(record.number, None)
        self._num_evicted += 1
        is_full = self.num_bytes > self._max_bytes
        is_worth_it = self._num_evicted * _LOOKS_PER_EVICTION >= len(self._seen)
        if self._num_evicted >= _EVICTIONS_PER_PURGE or (is_full and is_worth_it):
            self._purge()

    def _drop_loops(self, before: int) -> None:
        """Drop the loops with a number below `before`: they have no steps left in the ring.

        Loops run one after the other, so the ring has their steps in order.
        """
        while (number := next(iter(self._loops), before)) < before:
            self.num_bytes -= _size_of_loop(self._loops.pop(number))

    def _purge(self) -> None:
        """Drop requests that no record refers to, nor the last decode loop, which may go on."""
        self._num_evicted, self._in_loop = 0, None
        first = next((record.number for record in self._ring if isinstance(record, Invocation)), 0)
        last_loop = self._loops.get(self._num_loops)
        in_loop = set() if last_loop is None else {task.request for task in last_loop.tasks}
        for seen in [s for s in self._seen.values() if s.last < first and s.number not in in_loop]:
            del self._seen[id(seen.token_ids)], self._by_number[seen.number]
            self.num_bytes -= seen.size


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _held(arguments: Mapping[str, npt.NDArray[Any]]) -> dict[str, Array]:
    return {
        name: Array(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())
        for name, array in arguments.items()
    }


def _size_of_arrays(held: Mapping[str, Array]) -> int:
    return _RECORD_BYTES + sum(_TASK_BYTES + len(array.data) for array in held.values())


def _size_of_loop(loop: Loop) -> int:
    return _RECORD_BYTES + len(loop.tasks) * (2 * _TASK_BYTES)
