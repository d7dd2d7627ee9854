from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import count

import pytest

from shortfin_apps.llm.components.batching.waiting_queue import PRIORITY_STEP_S
from shortfin_apps.llm.components.engine import engine
from shortfin_apps.llm.components.invocation.entry_counts import TableCounts
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason, Terms
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError
from tests.components.engine_fixture import PROMPT, call, make_rig
from tests.components.fake_device import fake_config, fake_logits, greedy_continuation
from tests.components.stepped_engine import SteppedClock


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
def test_chunking_and_prefix_cache_do_not_change_tokens(
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
    token_ids = greedy_continuation(PROMPT, 8)
    eos = frozenset({token_ids[3]})
    first = token_ids.index(token_ids[3])
    rig = make_rig(eos=eos)
    rig.engine.add(call("stops", PROMPT, max_tokens=8))
    rig.engine.add(call("ignores", PROMPT, max_tokens=8, ignore_eos=True))
    rig.engine.add(call("later", PROMPT, max_tokens=8, min_tokens=8))
    rig.run()
    assert rig.outputs["stops"] == token_ids[: first + 1]
    assert rig.reason("stops") is FinishReason.STOP
    assert rig.last["stops"].stop_token_id is None
    assert rig.outputs["ignores"] == token_ids
    assert len(rig.outputs["later"]) == 8
    assert token_ids[3] not in rig.outputs["later"]


def test_stop_token_is_reported() -> None:
    token_ids = greedy_continuation(PROMPT, 4)
    rig = make_rig()
    rig.engine.add(call("a", PROMPT, max_tokens=9, stop_token_ids=frozenset({token_ids[1]})))
    rig.run()
    assert rig.outputs["a"] == token_ids[: token_ids.index(token_ids[1]) + 1]
    assert rig.last["a"].stop_token_id == token_ids[1]


def test_sampling_with_a_seed_is_batch_invariant() -> None:
    idle, crowded = make_rig(), make_rig(fake_config(pages=20))
    wanted = call("a", PROMPT, max_tokens=12, temperature=1.5, seed=11)
    idle.engine.add(wanted)
    idle.run()
    for i in range(5):
        crowded.engine.add(call(str(i), PROMPT[i + 1 :], max_tokens=12, temperature=1.0))
    crowded.engine.add(wanted)
    crowded.run()
    assert crowded.engine.stats().preemptions > 0
    assert crowded.outputs["a"] == idle.outputs["a"] != greedy_continuation(PROMPT, 12)


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


def test_logits_are_fetched_only_when_needed() -> None:
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
    assert stats.block_tables == TableCounts(rows_joined=4, uploads=1)  # the prefill's serves the decodes too


@pytest.mark.parametrize(
    ("mode", "on_gpu", "is_tuned"),
    [
        ("default", False, ("least",)),
        ("extend-attention", False, ("least",)),
        ("default", True, ()),
        ("extend-attention", True, ("while_decoding",)),
    ],
)
def test_what_is_measured_at_the_start_depends_on_device_and_mode(
    mode: str, on_gpu: bool, is_tuned: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(mode=mode, token_budget=16)
    after = rig.scheduler.mode.budget
    assert after is not None
    before = replace(after)
    monkeypatch.setattr(engine, "tokens_beside_decodes", lambda *_, mixes: 96 + mixes)
    monkeypatch.setattr(engine, "tokens_within_gap", lambda *_: before.while_decoding // 2)
    rig.engine.tune(on_gpu=on_gpu)
    changed = [f.name for f in fields(before) if getattr(before, f.name) != getattr(after, f.name)]
    assert changed == list(is_tuned)


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_computed_rows_are_counted_as_prefill_decode_or_padding(mode: str) -> None:
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


def test_queue_time_ends_with_the_first_step_of_a_request() -> None:
    clock = count()
    rig = make_rig(max_running=1, clock=lambda: float(next(clock)))
    rig.engine.add(call("a", PROMPT, max_tokens=3))
    rig.engine.add(call("b", PROMPT[1:], max_tokens=1))
    rig.run()
    assert rig.last["b"].queue_s > rig.last["a"].queue_s > 0


def test_each_step_computes_a_chunk() -> None:
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


def test_preemption_does_not_change_tokens() -> None:
    rig = make_rig(fake_config(pages=11), max_running=6)
    prompts = {str(i): [i + 1] * (2 * i + 3) for i in range(6)}
    for request_id, prompt in prompts.items():
        rig.engine.add(call(request_id, prompt, max_tokens=20))
    rig.run()
    assert rig.engine.stats().preemptions > 0
    for request_id, prompt in prompts.items():
        assert rig.outputs[request_id] == greedy_continuation(prompt, 20)
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


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_failed_download_of_logits_ends_only_the_requests_in_the_invocation(mode: str) -> None:
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


def test_logprobs_need_logits() -> None:
    rig = make_rig(logits_result=False)
    with pytest.raises(InvalidRequestError, match="without logits"):
        rig.engine.check(call("a", [1], logprobs=1))


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


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [([], 1, "empty"), ([1] * 60, 5, "context of 64"), ([1] * 30, 10, "--pages")],
)
def test_a_request_that_can_never_fit_is_refused(prompt: list[int], max_tokens: int, match: str) -> None:
    rig = make_rig(fake_config(pages=8))
    with pytest.raises(InvalidRequestError, match=match):
        rig.engine.check(call("a", prompt, max_tokens=max_tokens))
