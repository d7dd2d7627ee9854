"""NaN stays with the request it befell: on a device where a mask does not stop it.

Programs of upstream's exporter multiply what a mask hides by 0, and 0 * NaN is NaN. So what a request that
ended so leaves in its pages must not get to whoever has them next, nor to anybody through the scratch page.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.errors import InvocationError
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
OTHER = [2, 7, 1, 8]
PAGES = 10

modes = pytest.mark.parametrize("mode", ["default", "extend-attention"])
caches = pytest.mark.parametrize("prefix_cache", ["none", "trie"])


def leaky_rig(
    mode: str = "default",
    prefix_cache: PrefixCache = "trie",
    top_k: int | None = 4,
    static_lengths: tuple[int, ...] = (),
    pages: int = PAGES,
) -> Rig:
    """So few pages that whoever comes next gets those of who went."""
    return make_rig(
        fake_config(pages=pages, top_k=top_k),
        mode=mode,
        prefix_cache=prefix_cache,
        chunk_tokens=8,
        static_lengths=static_lengths,
        reads_masked=True,
    )


def expect_right_answers(rig: Rig, again: list[int]) -> None:
    """A prompt that was asked before, and one whose pages are everybody's."""
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
def test_the_next_user_of_its_pages_does_not_notice(
    mode: str, prefix_cache: PrefixCache, at_step: int, row: int
) -> None:
    """In the prompt's chunks and in decodes; of one length, so that no table names the scratch page."""
    rig = leaky_rig(mode, prefix_cache)
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
    expect_right_answers(rig, prompts[failed])


@caches
def test_the_scratch_page_is_clean_again(prefix_cache: PrefixCache) -> None:
    """The padding behind a prompt attends to it, and lies on the scratch page."""
    rig = leaky_rig(prefix_cache=prefix_cache, static_lengths=(8,))
    rig.engine.add(call("a", OTHER))
    spoil_next(rig)
    assert rig.reason("a") is FinishReason.ERROR
    expect_right_answers(rig, OTHER)
    assert not np.isnan(rig.slab.array).any()


@modes
@caches
def test_what_a_failed_invocation_left_is_cleaned_away(mode: str, prefix_cache: PrefixCache) -> None:
    """It may have computed NaN, of which nobody heard."""
    rig = leaky_rig(mode, prefix_cache)
    rig.engine.add(call("a", PROMPT))

    def fail(name: str) -> None:
        if name == "download":
            raise InvocationError("the device is on fire")

    rig.program.faults.call = fail
    spoil_next(rig)
    rig.program.faults.call = lambda name: None
    assert "on fire" in str(rig.last["a"].error)
    expect_right_answers(rig, PROMPT)


@caches
@pytest.mark.parametrize("goes", ["aborted", "preempted"])
def test_a_chunk_of_which_nothing_was_fetched_is_not_trusted(prefix_cache: PrefixCache, goes: str) -> None:
    """A model without a top-k of its own says nothing of chunks that are not the last."""
    rig = leaky_rig("default", prefix_cache, top_k=None)
    rig.engine.add(call("a", PROMPT))
    spoil_next(rig)
    assert not rig.last, "nobody knows yet"
    if goes == "aborted":
        rig.engine.abort("a")
    else:
        [request] = rig.scheduler.running
        request.preempt(rig.cache)
        rig.scheduler.running.remove(request)
        rig.scheduler.waiting.add_first(request)
        rig.run()
        assert rig.outputs["a"] == greedy_continuation(PROMPT, 4)
    expect_right_answers(rig, PROMPT)


def test_pages_that_cannot_be_cleaned_are_not_used_before_they_are() -> None:
    rig = leaky_rig()
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
    expect_right_answers(rig, PROMPT)


@modes
def test_a_shared_page_that_went_bad_does_not_end_every_later_request(mode: str) -> None:
    """Whoever read it ends in error; nobody finds it any more."""
    rig = leaky_rig(mode, pages=24)
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
    expect_right_answers(rig, PROMPT)
    assert not np.isnan(rig.slab.array).any()


def test_nothing_is_cleaned_while_all_goes_well() -> None:
    rig = leaky_rig()
    calls: list[str] = []
    rig.program.faults.call = calls.append
    for index in range(6):
        rig.engine.add(call(str(index), [index, *PROMPT], max_tokens=6))
    rig.step()
    rig.engine.abort("3")
    rig.run()
    assert "wait" in calls
    assert "clear" not in calls
