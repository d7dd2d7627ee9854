from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.request import (
    TRANSITIONS,
    IllegalTransitionError,
    Output,
    Request,
    State,
)
from tests.components.engine_fixture import call


def test_every_state_can_end() -> None:
    for state in State:
        seen, todo = {state}, deque([state])
        while todo:
            for following in TRANSITIONS[todo.popleft()] - seen:
                seen.add(following)
                todo.append(following)
        assert State.FINISHED in seen


def test_pages_are_held_exactly_while_running() -> None:
    cache = make_cache("none", 8, 4)
    request = Request(call("a", [1, 2, 3, 4, 5]))
    assert request.lease is None
    lease = cache.acquire(request.token_ids)
    assert cache.reserve(lease, 5)
    request.start(lease)
    assert cache.usage().leased == 2
    request.preempt(cache)
    assert request.lease is None
    assert cache.usage().free == cache.usage().total
    request.start(cache.acquire(request.token_ids))
    request.finish(FinishReason.LENGTH, cache)
    assert request.lease is None
    assert request.state is State.FINISHED


def test_an_illegal_transition_changes_nothing() -> None:
    cache = make_cache("none", 8, 4)
    request = Request(call("a", [1]))
    request.finish(FinishReason.ABORT, cache)
    with pytest.raises(IllegalTransitionError, match="finished -> finished"):
        request.finish(FinishReason.STOP, cache)
    assert request.finish_reason is FinishReason.ABORT


def test_a_seed_is_kept_and_a_missing_one_is_drawn() -> None:
    assert Request(call("a", [1], seed=7)).seed == 7
    assert Request(call("a", [1])).seed != Request(call("b", [1])).seed


SOME = st.one_of(st.none(), st.integers(-9, 9))


@given(st.lists(st.integers(), max_size=8), st.integers(0, 8), SOME, SOME, st.sampled_from([None, 1, 2, -1]))
def test_an_output_is_the_tokens_after_the_prompt(
    token_ids: list[int], num_prompt: int, begin: int | None, end: int | None, step: int | None
) -> None:
    num_prompt = min(num_prompt, len(token_ids))
    output, expected = Output(token_ids, num_prompt), token_ids[num_prompt:]
    assert (len(output), list(output)) == (len(expected), expected)
    assert output[begin:end:step] == expected[begin:end:step]
    assert [output[i] for i in range(-len(expected), len(expected))] == [*expected, *expected]
    with pytest.raises(IndexError):
        output[len(expected)]


def test_an_output_grows_with_its_request() -> None:
    request = Request(call("a", [1, 2]))
    request.token_ids += [3, 4]
    assert list(request.output) == [3, 4]
