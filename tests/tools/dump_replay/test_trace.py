"""The timeline keeps the rules of the trace-event format, as its document has them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.tools.dump_replay.trace import trace
from tests.tools.dump_replay.replays import dump_of
from tests.tools.dump_replay.test_replay import undisturbed, work

Event = dict[str, Any]


def traced(seed: int, path: Path) -> dict[str, Any]:
    rig, recorder = undisturbed(seed)
    clock = recorder.clock
    rng = random.Random(seed)
    rig.program.faults.call = lambda name: setattr(clock, "now_s", clock.now_s + rng.random())  # type: ignore[attr-defined]
    work(rig, seed)
    document: dict[str, Any] = json.loads(json.dumps(trace(dump_of(recorder.recording(), path, rig))))
    return document


@given(seed=st.integers(0, 10**6))
def test_it_is_in_the_trace_event_format(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    document = traced(seed, tmp_path_factory.mktemp("dumps") / "d")
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        check(event)
    check_slices_do_not_overlap(document["traceEvents"])


def check(event: Event) -> None:
    assert event["ph"] in ("X", "M", "C", "i")
    assert isinstance(event["name"], str)
    assert event["name"]
    for field in ("pid", "tid"):
        assert isinstance(event[field], int)
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] >= 0
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name")
        assert isinstance(event["args"]["name"], str)
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values())
        assert event["args"]
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")


def check_slices_do_not_overlap(events: list[Event]) -> None:
    """Slices of one thread must nest; here they follow each other."""
    ends: defaultdict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends[track] - 0.002  # of rounding
            ends[track] = event["ts"] + event["dur"]


def test_every_request_and_invocation_is_on_a_track(tmp_path: Path) -> None:
    document = traced(3, tmp_path / "d")
    events = document["traceEvents"]
    slices = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert slices <= named
    assert {pid for pid, _ in slices} == {1, 2, 3}
    assert {event["name"] for event in events if event["pid"] == 3 and event["ph"] == "X"} <= {
        "queued",
        "prefill",
        "decode",
    }
