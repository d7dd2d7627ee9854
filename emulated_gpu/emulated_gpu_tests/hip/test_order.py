"""Random programs of streams and events against a model that only knows what must happen before what."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from emulated_gpu.control import Control
from emulated_gpu_tests.devices import SETTINGS
from emulated_gpu_tests.hip.api import Handle, Hip

STREAMS = st.integers(0, 7)
EVENTS = st.integers(0, 2)


class OrderMachine(RuleBasedStateMachine):
    """Two devices, each with its null stream, a blocking one and two others, and three events.

    A piece of work is a host function that writes down its number. `before[s]` is the set of works that must
    have happened before what stream `s` is given next; an event holds such a set.
    """

    control: Control
    is_late = False

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.hip = Hip(self.control.library)
        self.control.command(f"seed {seed}")
        self.control.command(f"order {'late' if self.is_late else 'random'}")
        self.control.command("idle 60000")
        self.streams: list[Handle | None] = []
        for device in range(SETTINGS.devices):
            self.hip.set_device(device)
            self.streams += [None, self.hip.stream(0), self.hip.stream(), self.hip.stream()]
        self.before: list[frozenset[int]] = [frozenset()] * len(self.streams)
        self.events = [self.hip.event() for _ in range(3)]
        self.recorded: list[frozenset[int]] = [frozenset()] * len(self.events)
        self.expected: list[frozenset[int]] = []  # by work: what must have happened
        self.happened: list[int] = []
        self.demanded: frozenset[int] = frozenset()
        self.kept: list[object] = []

    def use(self, stream: int) -> Handle | None:
        """The stream's handle, with its device current. Applies the rule of the null stream to `before`."""
        first = stream - stream % 4
        self.hip.set_device(stream // 4)
        if stream == first:
            self.before[first] |= self.before[first + 1]
        elif stream == first + 1:
            self.before[stream] |= self.before[first]
        return self.streams[stream]

    @rule(stream=STREAMS)
    def work(self, stream: int) -> None:
        handle = self.use(stream)
        number = len(self.expected)
        self.expected.append(self.before[stream])
        self.before[stream] |= {number}
        self.kept.append(self.hip.call_host(handle, lambda: self.happened.append(number)))

    @rule(stream=STREAMS, event=EVENTS)
    def record(self, stream: int, event: int) -> None:
        self.hip.call("hipEventRecord", self.events[event], self.use(stream))
        self.recorded[event] = self.before[stream]

    @rule(stream=STREAMS, event=EVENTS)
    def wait(self, stream: int, event: int) -> None:
        self.hip.set_device(stream // 4)
        self.hip.call("hipStreamWaitEvent", self.streams[stream], self.events[event], ctypes.c_uint(0))
        self.before[stream] |= self.recorded[event]

    @rule(event=EVENTS)
    def query(self, event: int) -> None:
        if self.hip.is_done(self.events[event]):
            assert self.recorded[event] <= set(self.happened)

    @rule(event=EVENTS)
    def synchronise_event(self, event: int) -> None:
        self.hip.call("hipEventSynchronize", self.events[event])
        self.demand(self.recorded[event])

    @rule(stream=STREAMS)
    def synchronise_stream(self, stream: int) -> None:
        self.hip.synchronise(self.use(stream))
        self.demand(self.before[stream])

    def demand(self, works: frozenset[int]) -> None:
        assert works <= set(self.happened)
        self.demanded |= works

    @invariant()
    def nothing_runs_late_but_what_was_demanded(self) -> None:
        if self.is_late:
            assert set(self.happened) == self.demanded

    def teardown(self) -> None:
        if not hasattr(self, "streams"):
            return
        for stream in range(len(self.streams)):
            self.hip.set_device(stream // 4)
            self.hip.synchronise(self.streams[stream])
        assert sorted(self.happened) == list(range(len(self.expected)))
        for place, number in enumerate(self.happened):
            assert self.expected[number] <= set(self.happened[:place])
        for handle in filter(None, self.streams):
            self.hip.call("hipStreamDestroy", handle)
        for event in self.events:
            self.hip.call("hipEventDestroy", event)


@pytest.mark.parametrize("is_late", [False, True])
def test_every_order_is_one_that_streams_and_events_allow(fresh: Control, is_late: bool) -> None:
    class Machine(OrderMachine):
        pass

    Machine.control, Machine.is_late = fresh, is_late
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
