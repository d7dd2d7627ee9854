"""Converts a dump to a timeline in the trace-event format, for https://ui.perfetto.dev.

engine     steps of the engine's thread; numbers of running and waiting requests
device     invocations; one that was queued after another begins when the other ends
requests   one track per request: queued, prefill, decode
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shortfin_apps.llm.components.recorder.dump_file import Dump
from shortfin_apps.llm.components.recorder.records import (
    Clear,
    Draw,
    Header,
    Invocation,
    Logprobs,
    Loop,
    Recorded,
    Run,
    Step,
    Task,
    Turn,
)

Event = dict[str, Any]

ENGINE, DEVICE, REQUESTS = 1, 2, 3  # process ids in the trace
STEPS = 1
INVOCATIONS = 1


def trace(dump: Dump) -> dict[str, Any]:
    """Return the timeline as a trace-event JSON object; times are in microseconds since the first event."""
    timeline = _Timeline(dump)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"reason": dump.header.reason, "model": dump.header.model},
        "traceEvents": [*timeline.names(), *timeline.events()],
    }


class _Timeline:
    def __init__(self, dump: Dump) -> None:
        self._header: Header = dump.header
        self._requests = dump.recording.requests
        self._records = dump.recording.records
        self._loops: dict[int, Loop] = {loop.number: loop for loop in dump.recording.loops}
        # Only these have all their records: records before the dump's first one wrote the others' pages.
        self._new = [request for request in self._requests if not request.page_ids]
        begins_s = [each.began_s for each in self._records] + [each.arrival_s for each in self._new]
        self._zero_s = min(begins_s, default=dump.header.written_s)
        self._first_s: dict[int, float] = {}  # start of each request's first invocation
        for record in self._records:
            for task in self._tasks(record):
                self._first_s.setdefault(task.request, record.began_s)
        self._ends_us: dict[tuple[int, int], float] = {}  # end of each track's last slice
        self._unfinished_s = dict(_ends_of_unfinished(dump))

    def names(self) -> Iterator[Event]:
        for process, name in ((ENGINE, "engine"), (DEVICE, "device"), (REQUESTS, "requests")):
            yield _name("process_name", process, 0, name)
        yield _name("thread_name", ENGINE, STEPS, "steps")
        yield _name("thread_name", DEVICE, INVOCATIONS, "invocations")
        for request in self._requests:
            yield _name("thread_name", REQUESTS, request.number, request.request_id)

    def events(self) -> Iterator[Event]:
        for request in self._new:
            if (first_s := self._first_s.get(request.number)) is not None:
                yield self._slice(REQUESTS, request.number, "queued", request.arrival_s, first_s)
        for record in sorted(self._records, key=lambda record: record.began_s):
            yield from self._events_of(record)

    def _events_of(self, record: Recorded) -> Iterator[Event]:
        if isinstance(record, Turn):
            yield self._slice(ENGINE, STEPS, "step", record.began_s, record.ended_s)
            counts = {"running": record.num_running, "waiting": record.num_waiting}
            yield self._event("C", ENGINE, 0, "requests", record.ended_s, args=counts)
            preemptions = {"so far": record.num_preemptions}
            yield self._event("C", ENGINE, 0, "preemptions", record.ended_s, args=preemptions)
            return
        yield self._invocation(record)
        if record.error is not None:
            at_s = record.began_s if record.ended_s is None else record.ended_s
            yield self._event("i", DEVICE, INVOCATIONS, "failed", at_s, s="g", args={"error": record.error})
        for task in self._tasks(record):
            name = "decode" if len(task.token_ids) == 1 else "prefill"
            args = {"start": task.start, "tokens": len(task.token_ids), "record": record.number}
            end_s = self._end_s(record)
            yield self._slice(REQUESTS, task.request, name, record.began_s, end_s, args)

    def _invocation(self, record: Invocation) -> Event:
        args = {"record": record.number}
        match record:
            case Step(entry=name):
                args["step"] = record.index
            case Draw(entry=name):
                args["rows"] = record.num_draws
            case Logprobs(entry=name):
                args["rows"] = record.num_rows
            case Run(entry=name):
                args |= {"rows": len(record.tasks), "tokens": sum(len(t.token_ids) for t in record.tasks)}
            case Clear():
                name, args["pages"] = "clear pages", len(record.page_ids) + len(record.window_page_ids)
            case _:
                raise AssertionError("there is no other")
        name = name if record.ended_s is not None else f"{name} (has not ended)"
        return self._slice(DEVICE, INVOCATIONS, name, record.began_s, self._end_s(record), args)

    def _tasks(self, record: Recorded) -> list[Task]:
        if isinstance(record, Run):
            return list(record.tasks)
        if isinstance(record, Step):
            tasks = self._loops[record.loop].tasks
            return [Task(task.request, task.start + record.index, task.token_ids[:1]) for task in tasks]
        return []

    def _end_s(self, record: Invocation) -> float:
        return self._unfinished_s[record.number] if record.ended_s is None else record.ended_s

    def _slice(
        self, process: int, thread: int, name: str, began_s: float, ended_s: float, args: Event | None = None
    ) -> Event:
        """Create a slice (an event with a duration) that does not overlap the track's previous slice."""
        track = process, thread
        begin_us = max(self._us(began_s), self._ends_us.get(track, 0.0))
        end_us = max(begin_us, self._us(ended_s))
        self._ends_us[track] = end_us
        event = self._event("X", process, thread, name, began_s, args=args or {})
        return event | {"ts": begin_us, "dur": round(end_us - begin_us, 3)}

    def _event(self, phase: str, process: int, thread: int, name: str, at_s: float, **more: Any) -> Event:
        return {"ph": phase, "pid": process, "tid": thread, "name": name, "ts": self._us(at_s), **more}

    def _us(self, at_s: float) -> float:
        return round(1e6 * max(0.0, at_s - self._zero_s), 3)


def _ends_of_unfinished(dump: Dump) -> Iterator[tuple[int, float]]:
    """Yield the number of each record without an end, with the time until which it may have run.

    This is when the next record began that has an end: the engine had given up the unfinished one by then.
    """
    end_s = dump.header.written_s
    for record in reversed(dump.recording.records):
        if not isinstance(record, Turn):
            if record.ended_s is None:
                yield record.number, end_s
            else:
                end_s = min(end_s, record.began_s)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "ts": 0, "args": {"name": name}}
