from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.batching.scheduler import MAX_OVERTAKES, Scheduler
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request, State
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES
from tests.components.engine_fixture import call
from tests.components.fake_device import fake_config

MODE = make_mode(BatchSettings(batch_mode="default", chunk_tokens=8), fake_config(), ALL_ENTRIES)


def scheduler(pages: int, max_running: int = 8) -> Scheduler:
    cache = make_cache("none", pages, 4)
    return Scheduler(cache, MODE, max_running)


def add(target: Scheduler, request_id: str, length: int, **params: Any) -> Request:
    request = Request(call(request_id, [1] * length, **params))
    target.add(request)
    return request


def test_admits_in_order_up_to_max_running() -> None:
    target = scheduler(32, max_running=2)
    requests = [add(target, str(i), 4) for i in range(3)]
    target.plan()
    assert target.running == requests[:2]
    assert list(target.waiting) == requests[2:]


def test_a_request_that_does_not_fit_waits_and_starts_when_pages_come_back() -> None:
    target = scheduler(6)  # 5 pages to hand out
    first, second = add(target, "a", 16), add(target, "b", 16)
    target.plan()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    target.finish(first, FinishReason.LENGTH)
    target.plan()
    assert second.state is State.RUNNING


def test_the_youngest_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    target = scheduler(6)
    old, young, waiting = add(target, "old", 8), add(target, "young", 4), add(target, "w", 12)
    target.plan()
    assert target.running == [old, young]
    old.token_ids += [1] * 9  # into its fifth page: all there are
    target.plan()
    assert target.running == [old]
    assert list(target.waiting) == [young, waiting]
    assert target.num_preemptions == 1
    assert young.lease is None


def test_a_request_starts_only_if_a_page_is_left_for_each_running_one() -> None:
    target = scheduler(6)
    add(target, "a", 12)
    new = add(target, "b", 8)  # its two pages are free, but then none would be left to grow into
    target.plan()
    assert new.state is State.WAITING


def decoding(target: Scheduler, *requests: Request) -> None:
    target.plan()
    assert target.running == list(requests)
    for request in requests:
        request.num_computed = request.num_planned = len(request.token_ids)
        request.token_ids.append(1)
    target.plan()


def launched(target: Scheduler, batch: Batch | None) -> Batch:
    """Note that the batch is in flight."""
    assert batch is not None
    for task in batch.tasks:
        task.request.num_planned = task.seq_len
        task.request.num_drawing += task.completes
    return batch


def test_a_plan_counts_tokens_in_flight_as_computed_and_drawn() -> None:
    target = scheduler(8)
    request = add(target, "a", 7, max_tokens=3)
    launched(target, target.plan())
    [first] = launched(target, target.plan(may_preempt=False)).tasks
    [second] = launched(target, target.plan(may_preempt=False)).tasks
    assert [first.start_position, second.start_position] == [7, 8]
    assert first.is_unknown
    assert first.completes
    assert list(first.token_ids) == [-1 - request.slot]
    assert len(request.page_ids) >= 3, "its ninth token begins a page"
    assert target.plan(may_preempt=False) is None, "the device draws its last token"


def test_a_plan_is_followed_until_a_request_starts_or_ends() -> None:
    target = scheduler(32, max_running=2)
    first, second = add(target, "a", 2), add(target, "b", 2)
    launched(target, target.plan())
    last = launched(target, target.plan())
    add(target, "c", 2)  # no place for it
    batch = launched(target, target.plan(may_preempt=False))
    assert batch.series is last.series
    assert [task.start_position for task in batch.tasks] == [3, 3]
    target.finish(first, FinishReason.STOP)
    batch = launched(target, target.plan(may_preempt=False))
    assert batch.series is not last.series
    assert first not in {task.request for task in batch.tasks}
    assert second.state is State.RUNNING


def test_a_request_starts_while_others_are_in_flight() -> None:
    target = scheduler(16)
    add(target, "a", 6)
    launched(target, target.plan())
    new = add(target, "b", 4)
    batch = target.plan(may_preempt=False)
    assert batch is not None
    assert new.state is State.RUNNING


def test_running_requests_have_slots_of_their_own_and_give_them_back() -> None:
    target = scheduler(32)
    requests = [add(target, name, 4) for name in "abc"]
    target.plan()
    assert len({request.slot for request in requests}) == 3
    target.finish(requests[1], FinishReason.STOP)
    target.preempt(requests[0])
    target.plan()
    assert requests[0].slot != requests[2].slot


def test_any_running_request_can_be_preempted_and_comes_back_first() -> None:
    target = scheduler(32)
    first, second, third = add(target, "a", 8), add(target, "b", 4), add(target, "c", 4)
    target.plan()
    target.preempt(first)
    assert target.running == [second, third]
    assert list(target.waiting) == [first]
    assert (first.lease, target.num_preemptions) == (None, 1)
    target.plan()
    assert target.running == [second, third, first]


def test_nothing_is_preempted_for_a_step_ahead() -> None:
    target = scheduler(4)
    requests = [add(target, "a", 4), add(target, "b", 3)]
    decoding(target, *requests)
    for request in requests:
        request.token_ids += [1] * 4
    assert target.plan(may_preempt=False) is None, "four pages for three"
    assert target.running == requests


def running_pair(pages: int, max_tokens: int = 99) -> tuple[Scheduler, list[Request]]:
    """Requests of 6 and 7 tokens on two pages each, as pages hold 4."""
    target = scheduler(pages)
    requests = [Request(call("a", [1] * 6, max_tokens)), Request(call("b", [1] * 7, max_tokens))]
    for request in requests:
        target.add(request)
    target.plan()
    assert [len(request.page_ids) for request in requests] == [2, 2]
    return target, requests


def test_when_one_request_grows_into_a_page_all_do() -> None:
    target, requests = running_pair(32)
    grown_at = []
    for step in range(14):
        before = [len(request.page_ids) for request in requests]
        for request in requests:
            request.token_ids.append(1)
        target.plan()
        if (after := [len(request.page_ids) for request in requests]) != before:
            assert all(b > a for a, b in zip(before, after, strict=True)), "one grew and the other did not"
            grown_at.append(step)
    assert grown_at == [1, 6, 13]


def test_no_page_is_reserved_ahead_if_too_few_are_free_or_none_is_needed() -> None:
    target, requests = running_pair(7)  # 2 free
    requests[1].token_ids += [1, 1]
    target.plan()
    assert [len(request.page_ids) for request in requests] == [2, 3]
    target, requests = running_pair(32, max_tokens=2)
    requests[1].token_ids += [1, 1]
    target.plan()
    assert [len(request.page_ids) for request in requests] == [2, 3]


def test_finishing_a_waiting_request_takes_it_out_of_the_queue() -> None:
    target = scheduler(6, max_running=0)
    request = add(target, "a", 4)
    target.plan()
    target.finish(request, FinishReason.ABORT)
    assert not target.waiting


def test_smaller_requests_overtake_one_that_does_not_fit_only_so_often() -> None:
    target = scheduler(10, max_running=4)  # 9 pages to hand out
    holder = add(target, "holder", 16)
    target.plan()
    large = add(target, "large", 32)
    small = [add(target, str(i), 4) for i in range(MAX_OVERTAKES + 5)]
    overtook = 0
    while large.state is State.WAITING:
        target.plan()
        started = [r for r in small if r.state is State.RUNNING]
        for request in started:
            overtook += 1
            target.finish(request, FinishReason.LENGTH)
        if not started and holder.state is State.RUNNING:
            target.finish(holder, FinishReason.LENGTH)
    assert MAX_OVERTAKES <= overtook <= MAX_OVERTAKES + 4  # several start in the last plan


def shared_prefix_scheduler() -> Scheduler:
    cache = make_cache("trie", 64, 4)
    return Scheduler(cache, MODE, 8)


def test_a_request_waits_for_a_prefix_that_another_computes() -> None:
    target = shared_prefix_scheduler()
    first, second = add(target, "a", 20), add(target, "b", 20)
    other = Request(call("other", [2] * 20))
    target.add(other)
    target.plan()
    assert (first.state, second.state, other.state) == (State.RUNNING, State.WAITING, State.RUNNING)
    finish_prefill(target, first)
    target.plan()
    assert second.state is State.RUNNING
    assert second.num_cached == 16


def test_a_request_with_another_salt_does_not_wait() -> None:
    target = shared_prefix_scheduler()
    add(target, "a", 20)
    salted = Request(call("b", [1] * 20, salt="s"))
    target.add(salted)
    target.plan()
    assert salted.state is State.RUNNING


def test_a_request_that_waits_for_a_prefix_starts_when_the_other_is_aborted() -> None:
    target = shared_prefix_scheduler()
    first, second = add(target, "a", 20), add(target, "b", 20)
    target.plan()
    target.finish(first, FinishReason.ABORT)
    target.plan()
    assert second.state is State.RUNNING


def finish_prefill(target: Scheduler, request: Request) -> None:
    assert request.lease is not None
    request.num_computed = request.num_planned = len(request.token_ids)
    target._cache.publish(request.lease, request.token_ids)
    request.token_ids.append(1)


def test_resumed_requests_go_before_new_ones() -> None:
    target = scheduler(32, max_running=1)
    add(target, "running", 4)
    target.plan()
    new = add(target, "new", 4)
    resumed = Request(replace(call("old", [1] * 4), resumes=True))
    target.add(resumed)
    assert list(target.waiting) == [resumed, new]


def test_long_prompts_do_not_fill_the_batch() -> None:
    cache = make_cache("none", 200, 4)
    target = Scheduler(cache, MODE, 8, max_long_prefills=2, long_prefill_tokens=16)
    long = [add(target, f"long {i}", 40) for i in range(4)]
    short = [add(target, f"short {i}", 16) for i in range(3)]
    target.plan()
    assert target.running == [*long[:2], *short]
    long[0].num_computed = long[0].num_planned = 30  # the rest of it is short
    target.plan()
    assert target.running == [*long[:2], *short, long[2]]
    assert list(target.waiting) == [long[3]]


def test_a_long_prompt_with_a_long_cached_prefix_is_not_long() -> None:
    cache = make_cache("trie", 200, 4)
    target = Scheduler(cache, MODE, 8, max_long_prefills=1, long_prefill_tokens=16)
    first = add(target, "first", 40)
    target.plan()
    finish_prefill(target, first)
    other = Request(call("other", [2] * 40))
    target.add(other)
    target.plan()
    known = add(target, "known", 42)
    target.plan()
    assert target.running == [first, other, known]


def test_an_illegal_start_is_raised_and_leaks_no_page() -> None:
    target = scheduler(32)
    wrong = add(target, "wrong", 8)
    wrong.state = State.FINISHED
    with pytest.raises(IllegalTransitionError, match="finished -> running"):
        target.plan()
    target.discard(wrong)
    target.discard(wrong)
    assert target.plan() is None
    assert target._cache.usage().leased == 0
    assert not target.waiting


def test_finishing_twice_is_raised_and_changes_nothing() -> None:
    target = scheduler(32)
    request, other = add(target, "a", 8), add(target, "b", 8)
    target.plan()
    target.finish(request, FinishReason.LENGTH)
    with pytest.raises(IllegalTransitionError) as caught:
        target.finish(request, FinishReason.STOP)
    assert caught.value.request is request
    assert target.running == [other]


def started(target: Scheduler, request_id: str, length: int) -> Request:
    """A running request whose prompt has been computed but for its last token."""
    request = add(target, request_id, length)
    target.plan()
    request.num_computed = request.num_planned = length - 1
    return request


def test_proposed_tokens_get_the_pages_that_are_there_and_those_that_nobody_needs() -> None:
    target = scheduler(16)  # 15 pages of 4 tokens
    request = started(target, "a", 6)
    assert target.reserve_proposed(request, 2) == 2
    assert target.reserve_proposed(request, 9) == 9
    assert request.num_pages == 4


def test_proposed_tokens_take_no_page_from_those_who_run() -> None:
    target = scheduler(7)  # 6 pages: 2 of each, and as many left
    requests = [started(target, str(i), 6) for i in range(2)]
    assert [target.reserve_proposed(request, 5) for request in requests] == [2, 2]
    assert [request.num_pages for request in requests] == [2, 2]
