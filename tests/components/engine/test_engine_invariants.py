"""Invariants of the engine under arrivals, aborts and faults in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.errors import DeadlineExceededError
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation
from tests.components.stepped_engine import SteppedClock


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 16)), min_size=1, max_size=10),
    prefix_cache=st.sampled_from(["none", "trie"]),
    mode=st.sampled_from(["default", "extend-attention"]),
    loop_sizes=st.sampled_from([(), (1, 8)]),
    tenants=st.lists(st.sampled_from("ab"), min_size=10, max_size=10),
    window=st.none() | st.integers(1, 20),
    all_windowed=st.booleans(),
)
def test_progress_in_the_smallest_pool_that_holds_the_largest_request(
    lengths: list[tuple[int, int]],
    prefix_cache: PrefixCache,
    mode: str,
    loop_sizes: tuple[int, ...],
    tenants: list[str],
    window: int | None,
    all_windowed: bool,
) -> None:
    """A pool one page larger than the largest request, beside the scratch page; the fewest window pages."""
    largest = max(-(-(prompt + output) // 4) for prompt, output in lengths)
    options = {"max_long_prefills": 1, "long_prefill_tokens": 8}
    config = fake_config(pages=1 + largest + 1, window=window, all_windowed=all_windowed)
    rig = make_rig(config, prefix_cache=prefix_cache, mode=mode, loop_sizes=loop_sizes, scheduling=options)
    prompts = {str(i): ([i] * prompt, output) for i, (prompt, output) in enumerate(lengths)}
    for index, (name, (prompt, output)) in enumerate(prompts.items()):
        wanted = call(name, prompt, output, terms=Terms(tenant=tenants[index], priority=index % 3))
        rig.engine.check(wanted)
        rig.engine.add(wanted)
    rig.run()
    assert rig.outputs == {
        name: greedy_continuation(*asked, seen=window if all_windowed else None)
        for name, asked in prompts.items()
    }
    assert rig.all_pages_back()


@pytest.mark.parametrize("loop_sizes", [(), (8,)])
@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("all_windowed", [False, True])
def test_a_long_generation_holds_the_pages_of_its_window_alone(
    all_windowed: bool, prefix_cache: PrefixCache, mode: str, loop_sizes: tuple[int, ...]
) -> None:
    """And a long prompt those of a chunk besides."""
    window, stride, chunk = 12, 4, 8
    rig = make_rig(
        fake_config(pages=200, max_seq_len=400, window=window, all_windowed=all_windowed),
        prefix_cache=prefix_cache,
        mode=mode,
        loop_sizes=loop_sizes,
        chunk_tokens=chunk,
        token_budget=2 * chunk,
        more_window_pages=100,
    )
    prompt = [i % 5 for i in range(101)]
    rig.engine.add(call("a", prompt, 150))
    held = []
    while rig.engine.has_work:
        rig.step()
        usage = rig.cache.window_usage()
        assert usage is not None
        held.append(usage.leased)
        if rig.scheduler.running and rig.scheduler.running[0].num_generated > 1:
            assert usage.leased <= window // stride + 2
    assert max(held) <= (window + 2 * chunk) // stride + 2
    seen = window if all_windowed else None
    assert rig.outputs["a"] == greedy_continuation(prompt, 150, seen=seen)
    assert rig.all_pages_back()


@pytest.mark.parametrize("loop_sizes", [(), (8,)])
@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
def test_soak_of_ten_times_the_pool(
    prefix_cache: PrefixCache, mode: str, loop_sizes: tuple[int, ...]
) -> None:
    """Requests of every kind, first one at a time and then together, through a pool a tenth of their size."""
    rig = make_rig(
        fake_config(pages=20), prefix_cache=prefix_cache, mode=mode, max_running=6, loop_sizes=loop_sizes
    )
    random = np.random.default_rng(3)
    prompts = {str(i): random.integers(0, 3, int(random.integers(1, 30))).tolist() for i in range(120)}
    pages = sum(-(-(len(prompt) + 6) // 4) for prompt in prompts.values())
    assert pages > 10 * rig.cache.usage().total
    for index, (request_id, prompt) in enumerate(prompts.items()):
        rig.engine.add(call(request_id, prompt, max_tokens=6))
        if index < 60:
            rig.run()
        elif index % 10 == 9:
            rig.take([delta for delta in [rig.engine.abort(request_id)] if delta is not None])
    rig.run()
    for request_id, prompt in prompts.items():
        if rig.reason(request_id) is FinishReason.LENGTH:
            assert rig.outputs[request_id] == greedy_continuation(prompt, 6)
    usage = rig.cache.usage()
    assert usage.leased == 0
    assert usage.free + usage.cached == usage.total
    assert rig.all_pages_back()


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts and faults in any order, on a pool small enough to preempt."""

    mode = "default"
    loop_sizes: tuple[int, ...] = ()
    speculation: SpeculationOptions | None = None
    repeats = 0.0  # of the model

    def __init__(self) -> None:
        super().__init__()
        self.clock = SteppedClock()
        self.rig: Rig = make_rig(
            fake_config(pages=14),
            chunk_tokens=8,
            max_running=5,
            mode=self.mode,
            loop_sizes=self.loop_sizes,
            speculation=self.speculation,
            repeats=self.repeats,
            scheduling={"max_long_prefills": 1, "long_prefill_tokens": 12, "tenant_weights": {"b": 3.0}},
            clock=self.clock,
        )
        self.calls: dict[str, tuple[list[int], int]] = {}
        self.deadlines_s: dict[str, float] = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from([None, "", "s"]),
        terms=st.builds(
            Terms,
            priority=st.integers(-2, 2),
            tenant=st.sampled_from(["", "a", "b"]),
            timeout_s=st.none() | st.integers(0, 30).map(float),
        ),
    )
    def arrive(self, prompt: list[int], max_tokens: int, salt: str | None, terms: Terms) -> None:
        request_id = str(len(self.calls))
        self.calls[request_id] = (prompt, max_tokens)
        if terms.timeout_s is not None:
            self.deadlines_s[request_id] = self.clock.now_s + terms.timeout_s
        self.rig.engine.add(call(request_id, prompt, max_tokens, salt, terms))

    @precondition(lambda self: self.rig.engine.has_work)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            late = {name for name, at_s in self.deadlines_s.items() if at_s <= self.clock.now_s}
            assert late <= self.rig.last.keys(), "a step ends all that is late"
            self.clock.now_s += 1

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.calls)))
        delta = self.rig.engine.abort(request_id)
        assert (delta is None) == (request_id in self.rig.last)
        if delta is not None:
            self.rig.take([delta])

    @precondition(lambda self: self.rig.engine.has_work)
    @rule()
    def fail_one_invocation(self) -> None:
        def fail(entry: str) -> None:
            raise RuntimeError("boom")

        self.rig.program.faults.before = fail
        self.rig.step()
        self.rig.program.faults.before = lambda entry: None

    @invariant()
    def every_output_is_a_prefix_of_the_undisturbed_one(self) -> None:
        for request_id, got in self.rig.outputs.items():
            prompt, max_tokens = self.calls[request_id]
            assert got == greedy_continuation(prompt, max_tokens, self.repeats)[: len(got)]

    @invariant()
    def no_request_is_waiting_and_running(self) -> None:
        here = [*self.rig.scheduler.running, *self.rig.scheduler.waiting]
        assert len(self.rig.scheduler.waiting) == len(list(self.rig.scheduler.waiting))
        assert sorted(r.request_id for r in here) == sorted(self.calls.keys() - self.rig.last.keys())

    def teardown(self) -> None:
        self.rig.run()
        for name in self.calls:
            if isinstance(self.rig.last[name].error, DeadlineExceededError):
                assert self.deadlines_s[name] <= self.clock.now_s
        for request_id, (_, max_tokens) in self.calls.items():
            if self.rig.reason(request_id) is FinishReason.LENGTH:
                assert len(self.rig.outputs[request_id]) == max_tokens
        assert self.rig.all_pages_back()


class ExtendAttentionMachine(EngineMachine):
    mode = "extend-attention"


class PipelinedMachine(EngineMachine):
    loop_sizes = (2, 8)


class ExtendAheadMachine(ExtendAttentionMachine):
    loop_sizes = (2, 8)


class SpeculatingMachine(PipelinedMachine):
    speculation = SpeculationOptions(max_tokens=5, row_cost=0)
    repeats = 0.7


class ExtendSpeculatingMachine(ExtendAttentionMachine):
    speculation = SpeculationOptions(max_tokens=5, row_cost=0)
    repeats = 0.7


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
ExtendAttentionMachine.TestCase.settings = EngineMachine.TestCase.settings
TestEngineMachine = EngineMachine.TestCase
TestExtendAttentionMachine = ExtendAttentionMachine.TestCase
PipelinedMachine.TestCase.settings = EngineMachine.TestCase.settings
TestPipelinedMachine = PipelinedMachine.TestCase
ExtendAheadMachine.TestCase.settings = EngineMachine.TestCase.settings
TestExtendAheadMachine = ExtendAheadMachine.TestCase
SpeculatingMachine.TestCase.settings = EngineMachine.TestCase.settings
TestSpeculatingMachine = SpeculatingMachine.TestCase
ExtendSpeculatingMachine.TestCase.settings = EngineMachine.TestCase.settings
TestExtendSpeculatingMachine = ExtendSpeculatingMachine.TestCase


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=8),
    st.sampled_from([4, 8, 16]),
    st.sampled_from(["none", "trie"]),
    st.integers(1, 8),
    st.sampled_from(["default", "extend-attention"]),
    st.sampled_from([None, 8, 16, 40]),
    st.sampled_from([(1, ()), (1, (4, 16)), (2, ())]),
    st.sampled_from([(), (2, 8)]),
)
def test_tokens_do_not_depend_on_the_batch(
    prompts: list[list[int]],
    chunk_tokens: int,
    prefix_cache: PrefixCache,
    max_running: int,
    mode: str,
    token_budget: int | None,
    extend: tuple[int, tuple[int, ...]],
    loop_sizes: tuple[int, ...],
) -> None:
    """In both modes, with fixed chunks or up to a budget, and packed, bucketed and padded extend entries."""
    rig = make_rig(
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
        max_running=max_running,
        mode=mode,
        token_budget=token_budget,
        extend_rank=extend[0],
        extend_lengths=extend[1],
        loop_sizes=loop_sizes,
    )
    for index, prompt in enumerate(prompts):
        rig.engine.add(call(str(index), prompt, max_tokens=7))
    rig.run()
    for index, prompt in enumerate(prompts):
        assert rig.outputs[str(index)] == greedy_continuation(prompt, 7)
