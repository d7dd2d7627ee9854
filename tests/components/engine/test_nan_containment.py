"""NaN ends the request that it occurred in and no other, on a device where a mask does not stop it.

Programs of upstream's exporter multiply what a mask hides by 0, and 0 * NaN is NaN. So NaN must reach neither
the next owner of the request's pages nor, through the scratch page, anybody else.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvocationError
from tests.components.engine_fixture import PROMPT as LONG_PROMPT
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

PROMPT = LONG_PROMPT[:10]
OTHER = [2, 7, 1, 8]
PAGES = 10

modes = pytest.mark.parametrize("mode", ["default", "extend-attention"])
caches = pytest.mark.parametrize("prefix_cache", ["none", "trie"])


def small_rig(
    mode: str = "default",
    prefix_cache: PrefixCache = "trie",
    top_k: int | None = 4,
    static_lengths: tuple[int, ...] = (),
    pages: int = PAGES,
) -> Rig:
    """So few pages that the next request gets those of the last one."""
    return make_rig(
        fake_config(pages=pages, top_k=top_k),
        mode=mode,
        prefix_cache=prefix_cache,
        chunk_tokens=8,
        static_lengths=static_lengths,
        reads_masked=True,
    )


def expect_correct_tokens(rig: Rig, again: list[int]) -> None:
    """For a prompt that was sent before, and for one that takes every page."""
    rig.engine.add(call("again", again))
    rig.run()
    rig.engine.add(call("large", list(range(1, 31)), max_tokens=6))
    rig.run()
    assert rig.outputs["again"] == greedy_continuation(again, 4)
    assert rig.outputs["large"] == greedy_continuation(list(range(1, 31)), 6)
    assert rig.all_pages_back()


def spoil_next(rig: Rig, row: int = 0) -> None:
    rig.program.faults.spoil = lambda each: each == row
    rig.step()
    rig.program.faults.spoil = lambda each: False


@modes
@caches
@pytest.mark.parametrize("at_step", [0, 1, 2, 4])
@pytest.mark.parametrize("row", [0, 1])
def test_nan_does_not_reach_the_next_owner_of_its_pages(
    mode: str, prefix_cache: PrefixCache, at_step: int, row: int
) -> None:
    """In prompt chunks and in decodes; of one length, so that no block table names the scratch page."""
    rig = small_rig(mode, prefix_cache)
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    for name, prompt in prompts.items():
        rig.engine.add(call(name, prompt, max_tokens=6))
    for _ in range(at_step):
        rig.step()
    spoil_next(rig, row)
    [failed] = rig.last
    rig.run()
    [other] = prompts.keys() - {failed}
    assert rig.reason(failed) is FinishReason.ERROR
    assert isinstance(rig.last[failed].error, InvocationError)
    assert rig.outputs[other] == greedy_continuation(prompts[other], 6)
    expect_correct_tokens(rig, prompts[failed])


@caches
def test_the_scratch_page_is_cleared(prefix_cache: PrefixCache) -> None:
    """Padding after a prompt attends to it, and is written to the scratch page."""
    rig = small_rig(prefix_cache=prefix_cache, static_lengths=(8,))
    rig.engine.add(call("a", OTHER))
    spoil_next(rig)
    assert rig.reason("a") is FinishReason.ERROR
    expect_correct_tokens(rig, OTHER)
    assert not np.isnan(rig.slab.array).any()


@modes
@caches
def test_pages_of_a_failed_invocation_are_cleared(mode: str, prefix_cache: PrefixCache) -> None:
    """It may have computed NaN without anybody seeing it."""
    rig = small_rig(mode, prefix_cache)
    rig.engine.add(call("a", PROMPT))

    def fail(name: str) -> None:
        if name == "download":
            raise InvocationError("the device is on fire")

    rig.program.faults.call = fail
    spoil_next(rig)
    rig.program.faults.call = lambda name: None
    assert "on fire" in str(rig.last["a"].error)
    expect_correct_tokens(rig, PROMPT)


@caches
@pytest.mark.parametrize("goes", ["aborted", "preempted"])
def test_pages_of_a_chunk_whose_row_was_not_fetched_are_suspect(prefix_cache: PrefixCache, goes: str) -> None:
    """An entry without top-k has nothing fetched of chunks before the last."""
    rig = small_rig("default", prefix_cache, top_k=None)
    rig.engine.add(call("a", PROMPT))
    spoil_next(rig)
    assert not rig.last, "nothing was fetched yet"
    if goes == "aborted":
        rig.engine.abort("a")
    else:
        [request] = rig.scheduler.running
        request.preempt(rig.cache)
        rig.scheduler.running.remove(request)
        rig.scheduler.waiting.add_first(request)
        rig.run()
        assert rig.outputs["a"] == greedy_continuation(PROMPT, 4)
    expect_correct_tokens(rig, PROMPT)


def test_pages_are_not_used_before_clearing_them_succeeds() -> None:
    rig = small_rig()
    rig.engine.add(call("a", PROMPT))
    spoil_next(rig)
    tries = count()

    def fail(name: str) -> None:
        if name == "clear" and next(tries) < 2:
            raise RuntimeError("the device is on fire")

    rig.program.faults.call = fail
    for name in ("b", "c"):
        rig.engine.add(call(name, PROMPT))
        rig.run()
        assert "on fire" in str(rig.last[name].error)
    expect_correct_tokens(rig, PROMPT)


@modes
def test_nan_in_a_shared_page_does_not_end_every_later_request(mode: str) -> None:
    """A request that read it ends in an error; later ones do not find it."""
    rig = small_rig(mode, pages=24)
    rig.engine.add(call("first", PROMPT))
    rig.run()
    lease = rig.cache.acquire(PROMPT)
    bad = lease.page_ids[0]
    rig.cache.release(lease)
    rig.slab.array[bad] = np.nan
    rig.engine.add(call("other", OTHER, max_tokens=12))
    rig.engine.add(call("second", PROMPT, max_tokens=6))
    rig.engine.add(call("third", [*PROMPT, 7], max_tokens=6))
    rig.run()
    assert rig.outputs["other"] == greedy_continuation(OTHER, 12)
    assert rig.reason("second") is FinishReason.ERROR
    assert rig.reason("third") is FinishReason.ERROR
    expect_correct_tokens(rig, PROMPT)
    assert not np.isnan(rig.slab.array).any()


def test_nothing_is_cleared_without_a_fault() -> None:
    rig = small_rig()
    calls: list[str] = []
    rig.program.faults.call = calls.append
    for index in range(6):
        rig.engine.add(call(str(index), [index, *PROMPT], max_tokens=6))
    rig.step()
    rig.engine.abort("3")
    rig.run()
    assert "wait" in calls
    assert "clear" not in calls


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


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_pages_with_nan_are_not_shared(top_k: int | None, at_step: int) -> None:
    """Else one bad invocation would end every later request with the same beginning."""
    rig = make_rig(fake_config(top_k=top_k), chunk_tokens=8)
    rig.engine.add(call("a", LONG_PROMPT))
    for _ in range(at_step):
        rig.step()
    rig.program.faults.spoil = lambda row: True
    rig.step()
    rig.program.faults.spoil = lambda row: False
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    rig.engine.add(call("b", LONG_PROMPT))
    rig.run()
    assert rig.outputs["b"] == greedy_continuation(LONG_PROMPT, 4)


@modes
def test_nan_in_a_chunk_in_flight_of_an_aborted_request_does_not_reach_the_next_owner(mode: str) -> None:
    """The chunk yields no row that would show it."""
    rig = make_rig(
        fake_config(pages=PAGES),
        mode=mode,
        prefix_cache="none",
        token_budget=8,
        loop_sizes=(1, 2, 4, 8),
        sample_sizes=(1, 2, 4, 8),
        reads_masked=True,
    )
    rig.engine.add(call("before", OTHER, max_tokens=6))
    rig.step()
    rig.engine.add(call("aborted", PROMPT))
    while not any(r.request_id == "aborted" and r.num_planned for r in rig.scheduler.running):
        rig.step()
    delta = rig.engine.abort("aborted")
    assert delta is not None
    rig.take([delta])
    spoil_next(rig, row=0 if mode == "default" else 1)
    rig.run()
    rig.engine.add(call("later", [1], max_tokens=30))  # fills its pages one token after another
    rig.run()
    assert rig.outputs["before"] == greedy_continuation(OTHER, 6)
    assert rig.outputs["later"] == greedy_continuation([1], 30)
    assert rig.all_pages_back()
