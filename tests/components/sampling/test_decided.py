"""Tokens that candidates decide against those of the whole row, of which they are the best."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling import decided as decided_module
from shortfin_apps.llm.components.sampling.candidates import Candidates, Drawn
from shortfin_apps.llm.components.sampling.sampler import Sampler
from tests.components.engine_fixture import call
from tests.components.sampling.grammars import Allowing, Failing, Repeating
from tests.components.sampling.reference import adjusted
from tests.components.sampling.rows import LOGITS, SAMPLER, row

SIZE = 8  # of the vocabulary
token_ids = st.integers(0, SIZE - 1)
quarters = st.integers(-8, 8).map(lambda n: n / 4)
penalties = st.integers(-1, 8).map(lambda n: n / 4)
adjusting = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": penalties,
        "frequency_penalty": penalties,
        "repetition_penalty": st.sampled_from([0.9, 1.0, 1.3, 100.0]),
        "logit_bias": st.lists(
            st.tuples(token_ids | st.just(99), penalties.map(lambda n: -n)), max_size=3
        ).map(lambda pairs: tuple(dict(pairs).items())),
        "bad_words": st.lists(st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
        "allowed_token_ids": st.frozensets(token_ids, min_size=1),
        "min_tokens": st.integers(0, 3),
    },
)
sampling = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1, "seed": 5},
        {"temperature": 1.0, "top_k": 2, "seed": 5},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": 5},
        {"temperature": 1.0, "seed": 5},
    ]
)
grammars = st.none() | st.sets(token_ids, min_size=1).map(lambda allowed: Allowing(*allowed))
levels = st.lists(quarters | st.just(-np.inf), min_size=SIZE, max_size=SIZE)


def request_of(
    prompt: list[int], output: list[int], params: dict[str, Any], grammar: Allowing | None
) -> Request:
    request = Request(call("a", prompt, 99, **params, output_grammar=grammar))
    request.token_ids += output
    return request


@given(
    levels,
    adjusting,
    sampling,
    grammars,
    st.lists(token_ids, min_size=1, max_size=3),
    st.lists(token_ids, max_size=4),
    st.integers(1, SIZE),
    st.integers(0, 2),
)
def test_the_token_is_that_of_the_whole_row(
    values: list[float],
    params: dict[str, Any],
    sampled: dict[str, Any],
    grammar: Allowing | None,
    prompt: list[int],
    output: list[int],
    k: int,
    few: int,
) -> None:
    """Or none: what is equal, or more likely than before, may need the others."""
    logits = np.array(values, np.float32)
    some, everything = row(logits, k), row(logits, 0, full=True)
    if grammar is not None:
        params = {name: value for name, value in params.items() if name != "min_tokens"}  # refused together
    request = request_of(prompt, output, {**params, **sampled}, grammar)
    sampler = Sampler(frozenset({1}), num_candidates=k)
    with mock.patch.object(decided_module, "FEW", few):
        decided = sampler.decided(some, request)
    event(f"decided: {decided is not None}")
    if decided is None:
        return
    if grammar is not None and len(_bits(grammar)) == 1:
        assert [decided.token_id] == _bits(grammar), "whatever its logit"
        return
    assert decided.token_id == sampler.sample(everything, request)
    if request.call.params.greedy:
        allowed = set(range(SIZE) if grammar is None else _bits(grammar))
        expected = adjusted(logits, request.call.params, prompt, output, frozenset({1}))
        expected[[token_id for token_id in range(SIZE) if token_id not in allowed]] = -np.inf
        assert decided.token_id == expected.argmax()


def _bits(grammar: Allowing) -> list[int]:
    return [token_id for token_id in range(SIZE) if grammar.allowed(())[0] >> token_id & 1]


@given(levels, st.sets(st.integers(0, SIZE + 1)), st.integers(1, SIZE))
def test_candidates_decide_a_greedy_choice_under_a_grammar(
    values: list[float], allowed: set[int], k: int
) -> None:
    """Wherever it allows one of them."""
    logits = np.array([*values[:6], -9, -9], np.float32)
    request = request_of([1], [], {}, Allowing(*allowed & set(range(8))))
    some = row(logits, k)
    left = {token_id for token_id in allowed if token_id < SIZE and logits[token_id] > -np.inf}
    if some.is_finite and len(allowed & set(range(8))) > 1:
        decided = SAMPLER.decided(some, request)
        assert (decided is not None) == bool(left & set(some.token_ids.tolist()))


@pytest.mark.parametrize(
    ("params", "decided"),
    [  # the logits of 1, 4 and 3, which are the candidates, are 3, 2.5 and 2
        ({"presence_penalty": 0.4}, 1),
        ({"presence_penalty": 0.6}, 4),
        ({"presence_penalty": 0.5}, 1),  # as good as 4, whose id is higher
        ({"frequency_penalty": 0.4}, 4),
        ({"repetition_penalty": 1.25}, 4),
        ({"logit_bias": ((1, -2.0), (4, -0.25))}, 4),
        ({"logit_bias": ((1, -2.0), (4, -0.75))}, 3),
        ({"logit_bias": ((1, -2.0), (4, -2.0), (3, -0.5))}, None),  # another may be better now
        ({"logit_bias": ((1, -1.0), (4, -2.0), (3, -0.5))}, None),  # or as good, and its id lower
        ({"logit_bias": ((2, 1.0),)}, None),
        ({"presence_penalty": -0.1}, None),
        ({"repetition_penalty": 0.9}, None),
        ({"allowed_token_ids": frozenset({0, 2, 3})}, 3),
        ({"allowed_token_ids": frozenset({0, 2})}, None),
        ({"bad_words": ((1,),), "presence_penalty": 1}, 4),
        ({"presence_penalty": 0.4, "logprobs": 0}, None),
        ({"presence_penalty": 0.4, "temperature": 1.0}, None),
        ({"presence_penalty": 0.4, "temperature": 1.0, "top_k": 4}, None),
        ({"presence_penalty": 0.4, "temperature": 1.0, "top_k": 1}, 1),
    ],
)
def test_what_lowers_logits_is_decided_by_the_candidates_above_the_last(
    params: dict[str, Any], decided: int | None
) -> None:
    request = request_of([0], [1, 1], params, None)
    assert SAMPLER.decided(row(k=3), request) == (None if decided is None else Drawn(decided))
    if decided is not None:
        assert SAMPLER.sample(row(k=0, full=True), request) == decided


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_a_grammar_forces_needs_no_logits(temperature: float) -> None:
    request = request_of([1], [], {"temperature": temperature}, Allowing(2))
    assert SAMPLER.decided(row(k=1), request) == Drawn(2)
    banned = {"temperature": temperature, "bad_words": ((2,),)}
    assert SAMPLER.decided(row(k=1), request_of([1], [], banned, Allowing(2))) is None


def test_behind_proposed_tokens_a_grammar_is_followed_and_nothing_else() -> None:
    values = Candidates(LOGITS[[1, 4, 3]], np.array([1, 4, 3]), None)
    bound = request_of([1], [0], {}, Repeating())
    assert SAMPLER.decided(values, bound) == Drawn(1)
    assert SAMPLER.decided(values, bound, [1, 2]) == Drawn(3)
    assert SAMPLER.decided(values, bound, [1, 5]) is None
    assert SAMPLER.decided(values, request_of([1], [0], {"presence_penalty": 1}, Repeating()), [1]) is None
    assert SAMPLER.decided(values, request_of([1], [0], {"presence_penalty": 1}, None), [1]) is None


def test_a_grammar_that_fails_decides_nothing() -> None:
    assert SAMPLER.decided(row(), request_of([1], [], {}, Failing())) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_not_decided(bad: float) -> None:
    spoiled = row(np.full(6, bad, np.float32), 3)
    assert SAMPLER.decided(spoiled, request_of([1], [], {"temperature": 1.0}, Allowing(2))) is None
