from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shortfin_apps.llm.components.batching.scheduler import SchedulingOptions
from shortfin_apps.llm.components.batching.waiting_queue import PRIORITY_STEP_S
from shortfin_apps.llm.components.invocation.entry_counts import PlanCounts
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.components.request.request import IllegalTransitionError, State
from shortfin_apps.llm.errors import DeadlineExceededError, InvalidRequestError, InvocationError
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, fake_logits, greedy_continuation
from tests.components.stepped_engine import SteppedClock

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]


def test_greedy_is_what_the_model_says() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT, max_tokens=12))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation(PROMPT, 12)
    assert rig.reason("a") is FinishReason.LENGTH
    assert rig.all_pages_back()


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_tokens", [4, 8, 12, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 19, 52])
def test_same_tokens_whatever_the_chunking_and_the_cache(
    prefix_cache: PrefixCache, chunk_tokens: int, length: int
) -> None:
    prompt = (PROMPT * 3)[:length]
    rig = make_rig(prefix_cache=prefix_cache, chunk_tokens=chunk_tokens)
    for request_id in ("cold", "warm"):
        rig.engine.add(call(request_id, prompt, max_tokens=12))
        rig.run()
    assert rig.outputs["cold"] == rig.outputs["warm"] == greedy_continuation(prompt, 12)


def test_an_extended_prompt_computes_only_what_is_new() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT[:16], max_tokens=1))
    rig.run()
    before = rig.engine.stats().prompt_tokens
    rig.engine.add(call("b", [*PROMPT[:16], 7, 7], max_tokens=3))
    rig.run()
    assert rig.engine.stats().prompt_tokens - before == 2
    assert rig.last["b"].num_cached_tokens == 16
    assert rig.outputs["b"] == greedy_continuation([*PROMPT[:16], 7, 7], 3)


def test_salts_do_not_see_each_others_pages() -> None:
    rig = make_rig()
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        rig.engine.add(call(request_id, PROMPT, salt=salt))
        rig.run()
    cached = {name: rig.last[name].num_cached_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 16}


def test_generated_pages_are_shared_too() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT[:6], max_tokens=12))
    rig.run()
    follow_up = PROMPT[:6] + rig.outputs["a"] + [1]
    rig.engine.add(call("b", follow_up, max_tokens=2))
    rig.run()
    assert rig.last["b"].num_cached_tokens == 16


@pytest.mark.parametrize("top_k", [None, 1, 4])
@pytest.mark.parametrize("has_position", [True, False])
def test_every_result_form_gives_the_same_tokens(top_k: int | None, has_position: bool) -> None:
    config = fake_config(top_k=top_k, has_prefill_position=has_position)
    cache: PrefixCache = "trie" if has_position else "none"
    rig = make_rig(config, prefix_cache=cache)
    for i in range(6):
        rig.engine.add(call(str(i), PROMPT[i:], max_tokens=9))
    rig.run()
    for i in range(6):
        assert rig.outputs[str(i)] == greedy_continuation(PROMPT[i:], 9)


def test_eos_stops_unless_ignored_or_too_early() -> None:
    ids = greedy_continuation(PROMPT, 8)
    eos = frozenset({ids[3]})
    first = ids.index(ids[3])
    rig = make_rig(eos=eos)
    rig.engine.add(call("stops", PROMPT, max_tokens=8))
    rig.engine.add(call("ignores", PROMPT, max_tokens=8, ignore_eos=True))
    rig.engine.add(call("later", PROMPT, max_tokens=8, min_tokens=8))
    rig.run()
    assert rig.outputs["stops"] == ids[: first + 1]
    assert rig.reason("stops") is FinishReason.STOP
    assert rig.last["stops"].stop_token_id is None
    assert rig.outputs["ignores"] == ids
    assert len(rig.outputs["later"]) == 8
    assert ids[3] not in rig.outputs["later"]


def test_stop_token_is_reported() -> None:
    ids = greedy_continuation(PROMPT, 4)
    rig = make_rig()
    rig.engine.add(call("a", PROMPT, max_tokens=9, stop_token_ids=frozenset({ids[1]})))
    rig.run()
    assert rig.outputs["a"] == ids[: ids.index(ids[1]) + 1]
    assert rig.last["a"].stop_token_id == ids[1]


def test_a_seed_makes_a_request_reproducible_whatever_runs_beside_it() -> None:
    alone, crowded = make_rig(), make_rig(fake_config(pages=20))
    wanted = call("a", PROMPT, max_tokens=12, temperature=1.5, seed=11)
    alone.engine.add(wanted)
    alone.run()
    for i in range(5):
        crowded.engine.add(call(str(i), PROMPT[i + 1 :], max_tokens=12, temperature=1.0))
    crowded.engine.add(wanted)
    crowded.run()
    assert crowded.engine.stats().preemptions > 0
    assert crowded.outputs["a"] == alone.outputs["a"] != greedy_continuation(PROMPT, 12)


def test_logprobs_are_the_models() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT, max_tokens=1, logprobs=2))
    seen = []
    while rig.engine.has_work:
        deltas = rig.engine.step()
        seen += [entry for d in deltas for entry in d.logprobs]
        rig.take(deltas)
    logits = fake_logits(PROMPT).astype(float)

    norm = math.log(sum(math.exp(v) for v in logits))
    best = sorted(range(len(logits)), key=lambda i: -logits[i])[:2]
    assert [i for i, _ in seen[0].top] == best
    assert seen[0].logprob == pytest.approx(logits[best[0]] - norm)


def test_logits_stay_on_the_device_until_somebody_asks() -> None:
    rig = make_rig()
    fetched: list[tuple[int, ...]] = []
    download = rig.device.download
    rig.device.download = lambda buffer: fetched.append(buffer.shape) or download(buffer)  # type: ignore[method-assign,func-returns-value]
    rig.engine.add(call("a", PROMPT, max_tokens=5))
    rig.engine.add(call("b", PROMPT, max_tokens=5, temperature=1.0, top_k=3, seed=1))
    rig.run()
    assert {shape[-1] for shape in fetched} == {4}
    rig.engine.add(call("c", PROMPT, max_tokens=5, temperature=1.0, seed=1))
    rig.run()
    assert {shape[-1] for shape in fetched} == {4, 32}


def test_a_steady_decode_batch_keeps_its_block_table() -> None:
    rig = make_rig(fake_config(stride=16, pages=32))
    for i in range(4):
        rig.engine.add(call(str(i), PROMPT[:4], max_tokens=12))
    rig.run()
    stats = rig.engine.stats()
    assert stats.steps == 12  # one prefill, eleven decodes
    assert stats.plans == PlanCounts(plans=1, uploads=1)  # the prefill's serves the decodes too


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_every_row_computed_is_counted_by_what_for(mode: str) -> None:
    rig = make_rig(mode=mode, prefix_cache="none")
    for index, length in enumerate((14, 6, 20)):
        rig.engine.add(call(str(index), PROMPT[:1] * length, max_tokens=5))
    rig.run()
    entries = rig.engine.stats().entries.values()
    assert sum(counts.invocations for counts in entries) == rig.engine.stats().steps
    assert sum(counts.prefill_tokens.total for counts in entries) == 14 + 6 + 20
    assert sum(counts.decode_tokens.total for counts in entries) == 3 * 4
    rows = sum(math.prod(shape) for _, shape in rig.program.calls)
    assert rig.engine.stats().padded_tokens == rows - (14 + 6 + 20) - 3 * 4


def test_queue_time_ends_with_the_first_step_that_works_on_it() -> None:
    clock = count()
    rig = make_rig(max_running=1, clock=lambda: float(next(clock)))
    rig.engine.add(call("a", PROMPT, max_tokens=3))
    rig.engine.add(call("b", PROMPT[1:], max_tokens=1))
    rig.run()
    assert rig.last["b"].queue_s > rig.last["a"].queue_s > 0


def test_chunk_follows_chunk_at_once() -> None:
    rig = make_rig(chunk_tokens=4)
    rig.engine.add(call("a", PROMPT[:16], max_tokens=1))
    for _ in range(4):
        rig.step()
    assert not rig.engine.has_work


def test_a_static_chunk_entry_is_used_for_chunks_of_its_size() -> None:
    rig = make_rig(static_lengths=(8,))
    rig.engine.add(call("a", PROMPT[:18], max_tokens=1))
    rig.run()
    assert [name for name, _ in rig.program.calls] == ["prefill_bs1_s8", "prefill_bs1_s8", "prefill_bs1"]
    assert rig.outputs["a"] == greedy_continuation(PROMPT[:18], 1)


def test_pages_run_out_in_mid_decode_and_nobody_notices() -> None:
    rig = make_rig(fake_config(pages=11), max_running=6)
    prompts = {str(i): [i + 1] * (2 * i + 3) for i in range(6)}
    for request_id, prompt in prompts.items():
        rig.engine.add(call(request_id, prompt, max_tokens=20))
    rig.run()
    assert rig.engine.stats().preemptions > 0
    for request_id, prompt in prompts.items():
        assert rig.outputs[request_id] == greedy_continuation(prompt, 20)
    assert rig.all_pages_back()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 16)), min_size=1, max_size=10),
    prefix_cache=st.sampled_from(["none", "trie"]),
    mode=st.sampled_from(["default", "extend-attention"]),
    tenants=st.lists(st.sampled_from("ab"), min_size=10, max_size=10),
)
def test_progress_in_the_least_pool_that_holds_the_largest_request(
    lengths: list[tuple[int, int]], prefix_cache: PrefixCache, mode: str, tenants: list[str]
) -> None:
    """A pool one page larger than the largest request; the scratch page is nobody's."""
    largest = max(-(-(prompt + output) // 4) for prompt, output in lengths)
    options = SchedulingOptions(max_long_prefills=1, long_prefill_tokens=8)
    config = fake_config(pages=1 + largest + 1)
    rig = make_rig(config, prefix_cache=prefix_cache, mode=mode, scheduling=options)
    prompts = {str(i): ([i] * prompt, output) for i, (prompt, output) in enumerate(lengths)}
    for index, (name, (prompt, output)) in enumerate(prompts.items()):
        wanted = call(name, prompt, output, terms=Terms(tenant=tenants[index], priority=index % 3))
        rig.engine.check(wanted)
        rig.engine.add(wanted)
    rig.run()
    assert rig.outputs == {name: greedy_continuation(*asked) for name, asked in prompts.items()}
    assert rig.all_pages_back()


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
def test_no_page_is_lost_per_page_crossed(prefix_cache: PrefixCache) -> None:
    """Upstream lost one page for each request that decoded over a page boundary."""
    rig = make_rig(fake_config(pages=16), prefix_cache=prefix_cache)
    for i in range(60):
        rig.engine.add(call(str(i), [i % 29, i % 7, 5], max_tokens=14))
        rig.run()
    assert rig.all_pages_back()


def test_a_tiny_pool_with_padding_rows_gives_no_wrong_tokens() -> None:
    """Upstream handed out page 0, which padding rows write."""
    rig = make_rig(fake_config(pages=16, prefill=(4,), decode=(8,)))
    for i in range(28):
        rig.engine.add(call(str(i), [i % 5, 2, i % 3, 4, 1], max_tokens=6))
        rig.run()
        assert rig.outputs[str(i)] == greedy_continuation([i % 5, 2, i % 3, 4, 1], 6)


def test_a_failed_invocation_ends_only_its_own_requests() -> None:
    rig = make_rig(chunk_tokens=8)
    rig.engine.add(call("runs", PROMPT[:3], max_tokens=9))
    rig.step()
    rig.engine.add(call("fails", PROMPT, max_tokens=9))

    def fail(entry: str) -> None:
        if entry.startswith("prefill"):
            raise InvocationError("the device is on fire")

    rig.program.faults.before = fail
    rig.run()
    error = rig.last["fails"].error
    assert isinstance(error, InvocationError)
    assert "on fire" in str(error)
    assert rig.outputs["runs"] == greedy_continuation(PROMPT[:3], 9)
    assert rig.all_pages_back()


def test_a_row_of_nan_ends_that_request_alone() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT[:4], max_tokens=6))
    rig.engine.add(call("b", PROMPT[1:5], max_tokens=6))
    rig.step()
    rig.program.faults.spoil = lambda row: row == 0
    rig.step()
    rig.program.faults.spoil = lambda row: False
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    assert rig.outputs["b"] == greedy_continuation(PROMPT[1:5], 6)
    assert rig.all_pages_back()


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_logits_that_cannot_be_fetched_end_only_who_was_in_the_invocation(mode: str) -> None:
    rig = make_rig(max_running=1, mode=mode)
    rig.engine.add(call("a", PROMPT, max_tokens=6, logprobs=1))
    rig.engine.add(call("waits", PROMPT[2:], max_tokens=6))
    downloads = count()

    def fail(name: str) -> None:
        if name == "download" and next(downloads) >= 2:  # after the values and indices
            rig.program.faults.call = lambda name: None
            raise RuntimeError("the device is on fire")

    rig.program.faults.call = fail
    rig.run()
    assert "on fire" in str(rig.last["a"].error)
    assert rig.outputs["waits"] == greedy_continuation(PROMPT[2:], 6)
    assert rig.all_pages_back()


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_pages_with_nan_are_not_shared(top_k: int | None, at_step: int) -> None:
    """Else one bad invocation would end every later request with the same beginning."""
    rig = make_rig(fake_config(top_k=top_k), chunk_tokens=8)
    rig.engine.add(call("a", PROMPT))
    for _ in range(at_step):
        rig.step()
    rig.program.faults.spoil = lambda row: True
    rig.step()
    rig.program.faults.spoil = lambda row: False
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    rig.engine.add(call("b", PROMPT))
    rig.run()
    assert rig.outputs["b"] == greedy_continuation(PROMPT, 4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [([], 1, "empty"), ([1] * 60, 5, "context of 64"), ([1] * 30, 10, "--pages")],
)
def test_what_can_never_fit_is_refused(prompt: list[int], max_tokens: int, match: str) -> None:
    rig = make_rig(fake_config(pages=8))
    with pytest.raises(InvalidRequestError, match=match):
        rig.engine.check(call("a", prompt, max_tokens=max_tokens))


def test_logprobs_need_logits() -> None:
    rig = make_rig(logits_result=False)
    with pytest.raises(InvalidRequestError, match="without logits"):
        rig.engine.check(call("a", [1], logprobs=1))


def test_what_is_late_ends_with_what_it_has_wherever_it_is() -> None:
    clock = SteppedClock()
    rig = make_rig(max_running=1, clock=clock)
    rig.engine.add(call("runs", PROMPT[:4], max_tokens=20, terms=Terms(timeout_s=5)))
    rig.engine.add(call("waits", PROMPT, terms=Terms(timeout_s=3)))
    rig.engine.add(call("patient", PROMPT, max_tokens=2))
    for _ in range(6):
        rig.step()
        clock.now_s += 1
    assert (rig.reason("waits"), rig.outputs["waits"]) == (FinishReason.ABORT, [])
    assert (rig.reason("runs"), len(rig.outputs["runs"])) == (FinishReason.ABORT, 5)
    assert isinstance(rig.last["waits"].error, DeadlineExceededError)
    rig.run()
    assert rig.outputs["patient"] == greedy_continuation(PROMPT, 2)
    assert rig.all_pages_back()


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("max_running", [1, 4])
@pytest.mark.parametrize("comes_at", [0, 1, 7, 30])
def test_a_thousand_queued_requests_delay_another_tenants_first_by_one_service_time(
    mode: str, max_running: int, comes_at: int
) -> None:
    clock = SteppedClock()
    rig = make_rig(fake_config(pages=64), mode=mode, max_running=max_running, clock=clock)
    for i in range(1000):
        rig.engine.add(call(f"a{i}", [i % 30, i % 7, i % 11], max_tokens=5, terms=Terms(tenant="a")))
    began_s: dict[str, float] = {}
    service_s = 0.0
    while "b" not in began_s:
        if clock.now_s == comes_at:
            rig.engine.add(call("b", PROMPT[:3], max_tokens=5, terms=Terms(tenant="b")))
        for request_id in [r.request_id for r in rig.scheduler.running]:
            began_s.setdefault(request_id, clock.now_s - 1)  # it started in the step before
        rig.step()
        clock.now_s += 1
        for request_id in rig.last.keys() & began_s.keys():
            service_s = max(service_s, clock.now_s - began_s.pop(request_id))
    assert began_s["b"] - comes_at <= service_s
    assert len(rig.last) < 60, "and long before the others are through"


def test_a_low_priority_is_overtaken_for_a_bounded_time() -> None:
    clock = SteppedClock()
    rig = make_rig(max_running=1, clock=clock)
    rig.engine.add(call("low", PROMPT[:2], max_tokens=1, terms=Terms(priority=3)))
    index = 0
    while "low" not in rig.last:  # more urgent ones keep coming, as fast as they are served
        rig.engine.add(call(str(index), PROMPT[:2], max_tokens=1))
        rig.step()
        clock.now_s += 1
        index += 1
    assert 3 * PRIORITY_STEP_S <= clock.now_s <= 3 * PRIORITY_STEP_S + 2


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("started", [False, True])
def test_a_request_out_of_step_is_ended_alone(state: State, started: bool) -> None:
    """Whatever a bug makes of its state: the engine goes on and no page is lost."""
    rig = make_rig(strict=False, max_running=2)
    rig.engine.add(call("other", PROMPT, max_tokens=9))
    rig.step()
    rig.engine.add(call("wrong", PROMPT[2:], max_tokens=9))
    if started:
        rig.step()
    next(r for r in [*rig.scheduler.running, *rig.scheduler.waiting] if r.request_id == "wrong").state = state
    rig.run()
    assert rig.outputs["other"] == greedy_continuation(PROMPT, 9)
    if rig.reason("wrong") is not FinishReason.LENGTH:
        assert isinstance(rig.last["wrong"].error, InvocationError)
    assert rig.all_pages_back()
    assert not rig.scheduler.running
    assert not rig.scheduler.waiting


def test_a_request_out_of_step_raises_in_tests() -> None:
    rig = make_rig()
    rig.engine.add(call("a", PROMPT))
    next(iter(rig.scheduler.waiting)).state = State.FINISHED
    with pytest.raises(IllegalTransitionError, match="a: finished -> running"):
        rig.engine.step()


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
def test_soak_of_ten_times_the_pool(prefix_cache: PrefixCache, mode: str) -> None:
    """Requests of every kind, first one by one and then together, through a pool a tenth of their size."""
    rig = make_rig(fake_config(pages=20), prefix_cache=prefix_cache, mode=mode, max_running=6)
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

    def __init__(self) -> None:
        super().__init__()
        self.clock = SteppedClock()
        self.rig: Rig = make_rig(
            fake_config(pages=14),
            chunk_tokens=8,
            max_running=5,
            mode=self.mode,
            scheduling=SchedulingOptions(
                max_long_prefills=1, long_prefill_tokens=12, tenant_weights={"b": 3.0}
            ),
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
    def every_stream_is_a_prefix_of_the_undisturbed_one(self) -> None:
        for request_id, got in self.rig.outputs.items():
            prompt, max_tokens = self.calls[request_id]
            assert got == greedy_continuation(prompt, max_tokens)[: len(got)]

    @invariant()
    def nobody_is_in_two_places(self) -> None:
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


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
ExtendAttentionMachine.TestCase.settings = EngineMachine.TestCase.settings
TestEngineMachine = EngineMachine.TestCase
TestExtendAttentionMachine = ExtendAttentionMachine.TestCase


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=8),
    st.sampled_from([4, 8, 16]),
    st.sampled_from(["none", "trie"]),
    st.integers(1, 8),
    st.sampled_from(["default", "extend-attention"]),
    st.sampled_from([None, 8, 16, 40]),
    st.sampled_from([(1, ()), (1, (4, 16)), (2, ())]),
)
def test_a_batch_gives_what_each_gives_alone(
    prompts: list[list[int]],
    chunk_tokens: int,
    prefix_cache: PrefixCache,
    max_running: int,
    mode: str,
    token_budget: int | None,
    extend: tuple[int, tuple[int, ...]],
) -> None:
    """In either mode, in chunks of one size or up to a budget; with the extend entry packed, in buckets, or
    padded.
    """
    rig = make_rig(
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
        max_running=max_running,
        mode=mode,
        token_budget=token_budget,
        extend_rank=extend[0],
        extend_lengths=extend[1],
    )
    for index, prompt in enumerate(prompts):
        rig.engine.add(call(str(index), prompt, max_tokens=7))
    rig.run()
    for index, prompt in enumerate(prompts):
        assert rig.outputs[str(index)] == greedy_continuation(prompt, 7)
