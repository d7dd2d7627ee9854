from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Chooser, Request
from shortfin_apps.llm.components.sampling.adjustments import WHOLE_ROW, MinTokens, OutputGrammar
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.errors import ConstraintError, InvalidRequestError, InvocationError
from tests.components.engine_fixture import call
from tests.components.sampling.grammars import Allowing
from tests.components.sampling.reference import adjusted
from tests.components.sampling.rows import LOGITS, SAMPLER, row

MIN_TOKENS = MinTokens(frozenset({1}))
SIZE = 6  # of the vocabulary
token_ids = st.integers(0, SIZE - 1)
numbers = st.integers(-8, 8).map(lambda n: n / 4)
adjusting = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": numbers,
        "frequency_penalty": numbers,
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 100.0]),
        "logit_bias": st.lists(st.tuples(token_ids | st.just(99), numbers), max_size=3).map(
            lambda pairs: tuple(dict(pairs).items())
        ),
        "bad_words": st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "allowed_token_ids": st.frozensets(token_ids, min_size=1),
        "min_tokens": st.integers(0, 3),
    },
)


@given(
    st.lists(numbers, min_size=SIZE, max_size=SIZE),
    adjusting,
    st.lists(token_ids, min_size=1, max_size=5),
    st.lists(token_ids, max_size=6),
    st.booleans(),
)
def test_a_token_is_that_of_the_reference(
    levels: list[float], params: dict[str, Any], prompt: list[int], output: list[int], few: bool
) -> None:
    """Also from the candidates alone, where those decide."""
    logits = np.array(levels, np.float32)
    request = Request(call("a", prompt, 9, **params))
    sampler = Sampler(frozenset({1}), num_candidates=3)
    for token_id in output:  # as the engine does: a token at a time, of which the counts see each once
        request.token_counts.catch_up(request.token_ids)
        request.token_ids.append(token_id)
    expected = adjusted(logits, request.call.params, prompt, output, frozenset({1}))
    returned = row(logits, 3, full=not few or sampler.needs_logits(request))
    if np.isneginf(expected).all():
        with pytest.raises(ConstraintError, match="no token is left"):
            sampler.sample(returned, request)
        return
    assert sampler.sample(returned, request) == expected.argmax()
    assert logits.tolist() == levels, "the row itself is not written"


@given(st.lists(token_ids, max_size=200), st.integers(0, 200), st.lists(st.integers(0, 200), max_size=5))
def test_counts_do_not_depend_on_when_they_were_asked_for(
    tokens: list[int], num_prompt: int, asked_at: list[int]
) -> None:
    tokens = [token * 31 % 97 if i % 3 else i for i, token in enumerate(tokens)]
    request = Request(call("a", tokens[:num_prompt]))
    for end in sorted(asked_at):
        request.token_counts.catch_up(tokens[:end])
    counts, output = request.token_counts, tokens[num_prompt:]
    counts.catch_up(tokens)
    assert dict(zip(counts.token_ids, counts.counts, strict=True)) == {t: output.count(t) for t in tokens}


def test_min_tokens_bans_what_would_end_the_request() -> None:
    request = Request(call("a", [1], max_tokens=4, min_tokens=1, stop_token_ids=frozenset({4, 99})))
    adjusted = MIN_TOKENS.apply(row(full=True), request)
    assert adjusted.token_ids.tolist() == [3, 0, 5, 2]
    assert adjusted.logits is not None
    assert np.flatnonzero(np.isinf(adjusted.logits)).tolist() == [1, 4]
    assert np.isfinite(LOGITS).all(), "the row itself is not written"


def test_min_tokens_is_off_once_there_are_so_many() -> None:
    params = call("a", [1], min_tokens=2, stop_token_ids=frozenset({4})).params
    assert [MIN_TOKENS.num_lost(params, num_generated) for num_generated in range(4)] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    "params",
    [{"bad_words": ((1,), (7, 3))}, {"min_tokens": 1, "bad_words": ((3,),)}],
)
def test_bans_that_may_leave_no_allowed_token_are_refused(params: dict[str, Any]) -> None:
    sampler = Sampler(frozenset({1}))
    sampler.check(call("a", [1], allowed_token_ids=frozenset({1, 3, 4}), **params).params)
    with pytest.raises(InvalidRequestError) as caught:
        sampler.check(call("a", [1], allowed_token_ids=frozenset({1, 3}), **params).params)
    assert caught.value.param == "allowed_token_ids"


def test_a_nan_of_a_banned_token_is_an_error_all_the_same() -> None:
    """The engine looks at the row as it was computed; here the bans leave nothing finite."""
    spoiled = np.array([np.nan, 1.0], np.float32)
    request = Request(call("a", [1], allowed_token_ids=frozenset({0})))
    with pytest.raises(InvocationError, match="finite"):
        Sampler(frozenset()).sample(row(spoiled, 2, full=True), request)


def test_a_grammar_leaves_the_tokens_that_it_allows() -> None:
    request = Request(call("a", [1], temperature=1.0, output_grammar=Allowing(2, 5, 7)))
    masked = OutputGrammar().apply(row(full=True), request)
    assert masked.logits is not None
    assert np.flatnonzero(np.isfinite(masked.logits)).tolist() == [2, 5]
    assert masked.best_token_id == 5, "the row has no token 7"
    assert np.isfinite(LOGITS).all(), "the row itself is not written"


def test_a_grammar_that_leaves_no_token_is_an_error() -> None:
    request = Request(call("a", [1], output_grammar=Allowing(7)))
    with pytest.raises(ConstraintError, match="no token is left"):
        OutputGrammar().apply(row(full=True), request)


def test_a_grammar_needs_whole_rows() -> None:
    free, bound = call("a", [1]).params, call("a", [1], output_grammar=Allowing(1)).params
    assert [OutputGrammar().num_lost(params, 0) for params in (free, bound)] == [0, WHOLE_ROW]
    assert SAMPLER.chooser(Request(call("a", [1], output_grammar=Allowing(1)))) is Chooser.HOST
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        Sampler(frozenset(), num_candidates=4, returns_logits=False).check(bound)


def test_biases_of_a_token_that_is_there_twice_add_up() -> None:
    """As in llama.cpp's list of pairs."""
    request = Request(call("a", [1], logit_bias=((2, 3.0), (0, -1.0), (2, 3.0))))
    assert SAMPLER.sample(row(full=True), request) == 2
    once = Request(call("a", [1], logit_bias=((2, 3.0), (0, -1.0))))
    assert SAMPLER.sample(row(full=True), once) == 1
