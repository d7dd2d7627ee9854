from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall, Terms
from shortfin_apps.llm.contract.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvocationError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.beam_search import (
    MAX_BEAMS,
    BeamSearch,
    Hypothesis,
    check_num_beams,
)
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import VOCAB, fake_config, fake_logits, greedy_continuation
from tests.components.stepped_engine import SteppedClock
from tests.serving.frontend.beam_reference import Ranked, log_softmax, reference_search

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
NO_EOS = frozenset[int]()
PATIENCE_S = 60.0


@asynccontextmanager
async def serving(rig: Rig, max_requests: int = 64) -> AsyncIterator[AsyncEngine]:
    """The engine in its thread; asserts at the end that all pages are free."""
    engine = AsyncEngine(rig.engine, max_requests=max_requests)
    engine.start()
    try:
        yield engine
        await engine.drain(PATIENCE_S)
    finally:
        await engine.close()
    rig.cache.check_integrity()
    assert rig.all_pages_back()


async def search_to_end(search: BeamSearch) -> list[Hypothesis]:
    while not search.done:
        await search.step()
    return search.hypotheses


@functools.cache
def model(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return fake_logits(context)


def logits(context: Sequence[int]) -> npt.NDArray[np.float32]:
    return model(tuple(context))


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Ranked]) -> None:
    assert [h.token_ids for h in found] == [r.token_ids for r in expected]
    assert [h.score for h in found] == pytest.approx([r.score for r in expected])


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_tokens", [4, 8, 12, 64])
@pytest.mark.parametrize("num_beams", [1, 2, 4])
async def test_finds_the_hypotheses_of_an_exhaustive_search(
    prefix_cache: PrefixCache, chunk_tokens: int, num_beams: int
) -> None:
    rig = make_rig(prefix_cache=prefix_cache, chunk_tokens=chunk_tokens)
    async with serving(rig) as engine:
        for length in (1, 3, 4, 5, 19):
            search = await started(
                engine, call(str(length), PROMPT[:length], max_tokens=9), num_beams, NO_EOS
            )
            assert_same(await search_to_end(search), reference_search(logits, PROMPT[:length], num_beams, 9))


async def test_one_beam_is_greedy_decoding() -> None:
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=12), 1, NO_EOS)
        [hypothesis] = await search_to_end(search)
    assert list(hypothesis.token_ids) == greedy_continuation(PROMPT, 12)
    assert hypothesis.finish_reason is FinishReason.LENGTH


async def started(
    engine: AsyncEngine, request: GenerateCall, num_beams: int, eos: frozenset[int], **options: Any
) -> BeamSearch:
    search = BeamSearch(engine, request, num_beams, eos, **options)
    await search.start()
    return search


@dataclass(frozen=True)
class SearchCase:
    """One of many concurrent searches."""

    prompt: list[int]
    num_beams: int
    max_tokens: int
    min_tokens: int
    eos: frozenset[int]
    stops: frozenset[int]
    ignore_eos: bool

    async def start(self, engine: AsyncEngine, name: str) -> BeamSearch:
        params: dict[str, Any] = {"min_tokens": self.min_tokens, "stop_token_ids": self.stops}
        params["ignore_eos"] = self.ignore_eos
        request = call(name, self.prompt, max_tokens=self.max_tokens, **params)
        return await started(engine, request, self.num_beams, self.eos)

    @property
    def ends(self) -> frozenset[int]:
        return self.stops if self.ignore_eos else self.stops | self.eos

    def expected(self) -> list[Ranked]:
        return reference_search(
            logits,
            self.prompt,
            self.num_beams,
            self.max_tokens,
            ends=self.ends,
            banned_early=self.stops | self.eos,
            min_tokens=self.min_tokens,
        )


tokens = st.integers(0, VOCAB - 1)
enders = st.frozensets(tokens, max_size=5)


@st.composite
def search_cases(draw: st.DrawFn) -> SearchCase:
    max_tokens = draw(st.integers(1, 8))
    return SearchCase(
        prompt=draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)),  # so that prefixes are shared
        num_beams=draw(st.integers(1, 5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        eos=draw(enders),
        stops=draw(enders),
        ignore_eos=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(
    cases=st.lists(search_cases(), min_size=1, max_size=4),
    prefix_cache=st.sampled_from(["none", "trie"]),
    pages=st.sampled_from([18, 64]),
)
async def test_many_different_searches_with_little_memory(
    cases: list[SearchCase], prefix_cache: PrefixCache, pages: int
) -> None:
    rig = make_rig(fake_config(pages=pages), prefix_cache=prefix_cache)
    async with serving(rig) as engine:
        plain = engine.admit(call("plain", PROMPT, max_tokens=12))
        searches = [await case.start(engine, str(i)) for i, case in enumerate(cases)]
        found = await asyncio.gather(*(search_to_end(search) for search in searches))
        assert [t async for d in plain for t in d.token_ids] == greedy_continuation(PROMPT, 12)
    for case, hypotheses in zip(cases, found, strict=True):
        assert_same(hypotheses, case.expected())
        for hypothesis in hypotheses:
            last = hypothesis.token_ids[-1]
            assert hypothesis.finish_reason is (
                FinishReason.STOP if last in case.ends else FinishReason.LENGTH
            )
            is_eos = last in case.eos and not case.ignore_eos
            assert hypothesis.stop_token_id == (last if last in case.stops and not is_eos else None)


async def test_a_step_only_computes_the_last_page_of_each_beam() -> None:
    rig = make_rig()
    stride, num_beams, steps = rig.cache.stride, 4, 9
    async with serving(rig) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=steps), num_beams, NO_EOS)
        await search_to_end(search)
        assert engine.stats().prompt_tokens <= len(PROMPT) + (steps - 1) * num_beams * stride


async def test_log_probabilities_are_the_models() -> None:
    async with serving(make_rig()) as engine:
        request = call("a", PROMPT, max_tokens=4, logprobs=3)
        hypotheses = await search_to_end(await started(engine, request, 2, NO_EOS))
    for hypothesis in hypotheses:
        assert sum(entry.logprob for entry in hypothesis.logprobs) == pytest.approx(hypothesis.score)
        for position, entry in enumerate(hypothesis.logprobs):
            expected = log_softmax(logits([*PROMPT, *hypothesis.token_ids[:position]]))
            assert [i for i, _ in entry.top] == np.argsort(-expected)[:3].tolist()
            assert entry.logprob == pytest.approx(expected[hypothesis.token_ids[position]])


async def test_cached_tokens_are_those_of_the_prompt() -> None:
    async with serving(make_rig()) as engine:
        for expected in (0, 16):
            search = await started(engine, call("a", PROMPT), 2, NO_EOS)
            await search_to_end(search)
            assert search.num_cached_tokens == expected


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("invocation", [0, 3, 20])
async def test_cancelling_at_any_time_frees_all_pages(prefix_cache: PrefixCache, invocation: int) -> None:
    rig = make_rig(prefix_cache=prefix_cache)
    gate, invocations = Gate(rig), itertools.count()
    hold = rig.program.faults.before
    rig.program.faults.before = lambda entry: hold(entry) if next(invocations) >= invocation else None
    async with serving(rig) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=20), 4, NO_EOS)
        task = asyncio.create_task(search_to_end(search))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await engine.drain(PATIENCE_S)
        assert next(invocations) == invocation + 1  # nothing ran after the current invocation
        assert engine.stats().pages.leased == 0


async def test_closing_between_steps_frees_all_pages() -> None:
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=20), 4, NO_EOS)
        await search.step()
        search.close()
        search.close()
        await engine.drain(PATIENCE_S)
        assert engine.stats().pages.leased == 0


async def test_a_failing_beam_ends_the_search() -> None:
    rig = make_rig()
    async with serving(rig) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=20), 4, NO_EOS)
        await search.step()
        await search.step()
        rig.program.faults.spoil = lambda row: row == 1
        with pytest.raises(InvocationError, match="finite"):
            await search_to_end(search)


async def test_a_search_is_admitted_once() -> None:
    async with serving(make_rig(), max_requests=1) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=6), 4, NO_EOS)
        with pytest.raises(OverloadedError):
            await started(engine, call("b", PROMPT), 2, NO_EOS)
        assert_same(await search_to_end(search), reference_search(logits, PROMPT, 4, 6))


async def test_draining_lets_a_search_finish() -> None:
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=6), 2, NO_EOS)
        draining = asyncio.create_task(engine.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await started(engine, call("b", PROMPT), 2, NO_EOS)
        assert_same(await search_to_end(search), reference_search(logits, PROMPT, 2, 6))
        await draining


async def test_an_abort_ends_the_search() -> None:
    rig = make_rig()
    async with serving(rig) as engine:
        gate = Gate(rig)
        search = await started(engine, call("a", PROMPT), 2, NO_EOS)
        assert engine.abort("a/0/0")  # as draining does at its timeout
        gate.open()
        with pytest.raises(RequestAbortedError):
            await search_to_end(search)


async def test_an_abort_ends_a_search_whose_step_is_already_answered() -> None:
    """The engine then has none of its requests, so the search itself must remember the abort."""
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=20), 2, NO_EOS)
        await search.step()
        async with asyncio.timeout(PATIENCE_S):
            while engine._requests:
                await asyncio.sleep(0)
        search.abort()
        with pytest.raises(RequestAbortedError):
            await search_to_end(search)


async def test_draining_waits_for_all_steps_of_a_search() -> None:
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=20), 2, NO_EOS)
        searching = asyncio.create_task(search_to_end(search))
        await engine.drain(PATIENCE_S)
        assert search.done
        assert_same(await searching, reference_search(logits, PROMPT, 2, 20))


async def test_draining_aborts_a_search_at_its_timeout() -> None:
    async with serving(make_rig()) as engine:
        search = await started(engine, call("a", PROMPT, max_tokens=40), 2, NO_EOS)
        searching = asyncio.create_task(search_to_end(search))
        await engine.drain(0)
        with pytest.raises(RequestAbortedError):
            await searching


async def test_the_steps_of_a_search_share_its_timeout() -> None:
    clock = SteppedClock()
    rig = make_rig(clock=clock)
    async with serving(rig) as engine:
        timed_call = call("a", PROMPT, max_tokens=20, terms=Terms(timeout_s=5.0))
        search = await started(engine, timed_call, 2, NO_EOS, clock=clock)
        for _ in range(3):
            await search.step()
            clock.now_s += 1.0
        clock.now_s += 3.0
        with pytest.raises(DeadlineExceededError, match="time"):
            await search_to_end(search)


async def test_more_stop_tokens_than_alternatives_are_refused() -> None:
    async with serving(make_rig()) as engine:
        stops = frozenset(range(16))
        await started(engine, call("a", PROMPT, stop_token_ids=stops), 4, NO_EOS)
        with pytest.raises(InvalidRequestError, match="at most 15") as caught:
            await started(engine, call("b", PROMPT, stop_token_ids=stops), 5, NO_EOS)
    assert caught.value.param == "stop_token_ids"


async def test_beams_need_a_model_with_logits() -> None:
    async with serving(make_rig(logits_result=False)) as engine:
        with pytest.raises(InvalidRequestError, match="without logits") as caught:
            await started(engine, call("a", PROMPT), 2, NO_EOS)
    assert caught.value.param == "num_beams"


@pytest.mark.parametrize(("num_beams", "exported"), [(1, 1), (1, None), (4, 4), (MAX_BEAMS, None)])
def test_supported_numbers_of_beams(num_beams: int, exported: int | None) -> None:
    check_num_beams(num_beams, exported)


@pytest.mark.parametrize(
    ("num_beams", "exported", "extra"),
    [
        (0, None, {}),
        (-1, 4, {}),
        (5, 4, {"exported_topk": 4, "requested_topk": 5}),
        (MAX_BEAMS + 1, None, {}),
        (MAX_BEAMS + 1, 64, {}),
    ],
)
def test_unsupported_numbers_of_beams_are_refused(
    num_beams: int, exported: int | None, extra: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_num_beams(num_beams, exported)
    assert (caught.value.param, caught.value.extra) == ("num_beams", extra)
