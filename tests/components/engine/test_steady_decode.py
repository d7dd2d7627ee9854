"""A steady decode does what the engine's general path does, which an engine beside it takes in each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.engine.steady_decode import SteadyDecode
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.messages import Delta, Terms
from shortfin_apps.llm.components.request.request import Request
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import VOCAB, fake_config, greedy_continuation
from tests.components.stepped_engine import SteppedClock


def make_pair(**options: Any) -> tuple[Rig, Rig]:
    """An engine with steady decodes, and one that takes the general path in each step."""
    with_steady, without = (make_rig(loop_sizes=(2, 8), **options) for _ in range(2))
    without.engine._steady_decode = lambda: None  # type: ignore[method-assign,assignment,return-value]
    return with_steady, without


def told(deltas: list[Delta]) -> list[tuple[Delta, str]]:
    """Deltas to be compared; errors are compared by their message."""
    return [(delta._replace(error=None), str(delta.error)) for delta in deltas]


def counters(rig: Rig) -> EngineStats:
    return replace(rig.engine.stats(), device_s=0.0)


def state(request: Request) -> dict[str, Any]:
    fields = ("request_id", "token_ids", "num_computed", "num_cached", "last_turn", "num_overtakes", "state")
    lease = request.lease
    held = None if lease is None else (lease.page_ids, lease.num_shared_pages, lease.is_suspect)
    return {name: getattr(request, name) for name in fields} | {"lease": held}


class SteadyDecodeMachine(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines and faults in any order, the same for both engines."""

    @initialize(
        pages=st.sampled_from([12, 20, 60]),
        mode=st.sampled_from(["default", "extend-attention"]),
        prefix_cache=st.sampled_from(["trie", "none"]),
        max_running=st.sampled_from([2, 8]),
        eos=st.sampled_from([frozenset(), frozenset({7})]),
    )
    def start(self, pages: int, mode: str, prefix_cache: str, max_running: int, eos: frozenset[int]) -> None:
        self.clock = SteppedClock()
        self.rigs = make_pair(
            config=fake_config(pages=pages),
            mode=mode,
            prefix_cache=prefix_cache,
            max_running=max_running,
            eos=eos,
            scheduling={"tenant_weights": {"b": 3.0}},
            clock=self.clock,
        )
        self.num_requests = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        ignore_eos=st.booleans(),
        sampling=st.sampled_from([{}, {"temperature": 1.0, "top_k": 3, "seed": 5}]),
        terms=st.builds(
            Terms,
            tenant=st.sampled_from(["a", "b"]),
            timeout_s=st.none() | st.integers(5, 40).map(float),
        ),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        stops: frozenset[int],
        ignore_eos: bool,
        sampling: dict[str, Any],
        terms: Terms,
    ) -> None:
        wanted = call(
            str(self.num_requests),
            prompt,
            max_tokens,
            terms=terms,
            stop_token_ids=stops,
            ignore_eos=ignore_eos,
            **sampling,
        )
        self.num_requests += 1
        for rig in self.rigs:
            rig.engine.add(wanted)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            one, other = (rig.engine.step() for rig in self.rigs)
            assert told(one) == told(other)
            self.clock.now_s += 1

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = str(data.draw(st.integers(0, self.num_requests - 1)))
        one, other = (rig.engine.abort(request_id) for rig in self.rigs)
        assert one == other

    @rule()
    def flush(self) -> None:
        for rig in self.rigs:
            rig.engine.flush_cache()

    @rule(row=st.integers(0, 3))
    def spoil_a_row(self, row: int) -> None:
        for rig in self.rigs:
            rig.program.faults.spoil = lambda spoilt: spoilt == row
        self.step(1)
        for rig in self.rigs:
            rig.program.faults.spoil = lambda spoilt: False

    @rule(what=st.sampled_from(["submit", "wait", "download"]))
    def fail(self, what: str) -> None:
        def fault(name: str) -> None:
            if name == what:
                raise RuntimeError("boom")

        for rig in self.rigs:
            rig.program.faults.call = fault
        self.step(1)
        for rig in self.rigs:
            rig.program.faults.call = lambda name: None

    @invariant()
    def both_are_in_the_same_state(self) -> None:
        if not hasattr(self, "rigs"):
            return
        one, other = self.rigs
        assert counters(one) == counters(other)
        assert one.program.calls == other.program.calls
        for queue in ("running", "waiting"):
            requests = [list(getattr(rig.scheduler, queue)) for rig in self.rigs]
            assert list(map(state, requests[0])) == list(map(state, requests[1]))
        assert vars(one.scheduler._share) == vars(other.scheduler._share)
        assert one.cache.suspects == other.cache.suspects
        assert np.array_equal(one.slab.array, other.slab.array, equal_nan=True)
        one.cache.check_integrity()

    def teardown(self) -> None:
        while hasattr(self, "rigs") and any(rig.engine.has_work for rig in self.rigs):
            self.step(1)


SteadyDecodeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSteadyDecodeMachine = SteadyDecodeMachine.TestCase


def test_most_steps_of_a_long_decode_are_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[int] = []
    commit = SteadyDecode.commit

    def counted(self: SteadyDecode, token_ids: list[int]) -> list[Delta]:
        commits.append(len(token_ids))
        return commit(self, token_ids)

    monkeypatch.setattr(SteadyDecode, "commit", counted)
    rig = make_rig(fake_config(stride=16, max_seq_len=256), loop_sizes=(2,))
    for name in "ab":
        rig.engine.add(call(name, [1, 2, 3], 100))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation([1, 2, 3], 100)
    assert len(commits) > 80
    assert set(commits) == {2}


def test_full_pages_are_shared_while_the_decode_goes_on() -> None:
    rig = make_rig(fake_config(stride=4, pages=64), loop_sizes=(2,))
    rig.engine.add(call("a", [1, 2, 3], 60))
    for _ in range(30):
        rig.step()
    tokens = [1, 2, 3, *rig.outputs["a"]]
    assert rig.cache.match_length(tokens) >= (len(tokens) - 1) // 4 * 4 - 4


@dataclass
class Held:
    """A steady decode of "a", beside pages that somebody else holds; "b" waits for as many."""

    rig: Rig
    lease: Lease

    @property
    def holds(self) -> bool:
        steady = self.rig.engine._steady
        return steady is not None and steady.holds


@pytest.fixture
def held() -> Held:
    rig = make_rig(fake_config(stride=16, pages=8, max_seq_len=96), loop_sizes=(2,), prefix_cache="none")
    lease = rig.cache.acquire([])
    assert rig.cache.reserve(lease, 4 * 16)
    rig.engine.add(call("a", [1, 2, 3], 40))
    rig.engine.add(call("b", [1] * 40, 40))
    made = Held(rig, lease)
    for _ in range(4):
        rig.step()
    assert made.holds
    return made


def test_it_ends_when_a_waiting_request_may_start(held: Held) -> None:
    held.rig.cache.release(held.lease)
    assert not held.holds
    for _ in range(2):
        held.rig.step()
    assert [request.request_id for request in held.rig.scheduler.running] == ["a", "b"]


def test_it_ends_when_pages_are_to_be_cleared(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.rig.scheduler, "may_admit", lambda: False)
    held.lease.is_suspect = True
    held.rig.cache.release(held.lease)
    assert held.rig.cache.suspects
    assert not held.holds
    for _ in range(2):
        held.rig.step()
    assert not held.rig.cache.suspects


def test_it_ends_with_a_request_of_it(held: Held) -> None:
    held.rig.engine.abort("a")
    assert not held.holds
