from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.sampling import (
    Candidates,
    banned_tokens,
    choose,
    logprobs_of,
    needs_logits,
)
from shortfin_apps.llm.errors import InvalidRequestError, InvocationError
from tests.components.engine_fixture import call

LOGITS = np.array([0.5, 3.0, -1.0, 2.0, 2.5, 0.0], np.float32)
NOBODY: frozenset[int] = frozenset()


def row(logits: np.ndarray = LOGITS, k: int = 6, *, full: bool = False) -> Candidates:
    order = np.argsort(-logits, kind="stable")[:k]
    return Candidates(logits[order], order, logits if full else None)


def draws(count: int, *, full: bool = False, **params: Any) -> np.ndarray:
    request = Request(call("a", [1], max_tokens=count, seed=5, **params))
    tokens = []
    for _ in range(count):
        tokens.append(choose(row(full=full), request, NOBODY))
        request.tokens.append(0)
    return np.bincount(tokens, minlength=6) / count


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def test_greedy_takes_the_best_and_the_lower_id_of_equals() -> None:
    request = Request(call("a", [1]))
    assert choose(row(), request, NOBODY) == 1
    equal = np.array([1.0, 2.0, 2.0], np.float32)
    assert choose(row(equal), request, NOBODY) == 1
    assert choose(row(equal, full=True), request, NOBODY) == 1


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    expected = softmax(LOGITS.astype(np.float64) / temperature)
    assert np.abs(draws(4000, full=True, temperature=temperature) - expected).max() < 0.03


def test_top_k_draws_from_the_best_k_only() -> None:
    got = draws(2000, temperature=1.0, top_k=2)
    assert np.flatnonzero(got).tolist() == [1, 4]
    assert got[1] == pytest.approx(softmax(LOGITS[[1, 4]])[0], abs=0.04)


def test_top_p_keeps_the_least_set_that_reaches_the_mass() -> None:
    probs = softmax(LOGITS.astype(np.float64))
    assert np.flatnonzero(draws(500, full=True, temperature=1.0, top_p=probs[1] - 0.01)).tolist() == [1]
    assert np.flatnonzero(draws(500, full=True, temperature=1.0, top_p=probs[1] + 0.01)).tolist() == [1, 4]


@pytest.mark.parametrize("full", [True, False])
def test_the_least_top_p_still_keeps_the_best(full: bool) -> None:
    """Times a mass in f32, this is 0."""
    assert draws(5, full=full, temperature=1.0, top_p=2.2e-109)[1] == 1


least_normal = float(np.finfo(np.float32).tiny)
rows = st.lists(st.integers(-40, 40), min_size=4, max_size=12, unique=True)


@given(
    st.floats(min_value=5e-324, max_value=1e-30, allow_subnormal=True)
    | st.sampled_from([5e-324, 1e-320, 1e-46, 1e-45, 1e-39, least_normal, 2 * least_normal]),
    rows,
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": 1e-300}, {"min_p": 0.5}, {"min_p": 1e-300}]),
    st.sampled_from([1.0, 1e30, 1e38]),
    st.booleans(),
)
def test_the_least_temperatures_are_greedy(
    temperature: float, levels: list[int], filters: dict[str, Any], scale: float, full: bool
) -> None:
    """In f32 the smallest are 0, and 0 / 0 would be a weight; others scale logits beyond its range."""
    logits = np.array(levels, np.float32) * np.float32(scale / 40)
    request = Request(call("a", [1], temperature=temperature, seed=3, **filters))
    assert choose(row(logits, 4, full=full), request, NOBODY) == logits.argmax()


@given(
    st.floats(min_value=5e-324, max_value=1e-10, allow_subnormal=True),
    st.floats(min_value=0, max_value=1, allow_subnormal=True),
    rows,
    st.sampled_from([0.3, 1.0, 100.0]),
    st.sampled_from([0, 3, 2**70]),
)
def test_the_least_filters_are_followed(
    top_p: float, min_p: float, levels: list[int], temperature: float, top_k: int
) -> None:
    """The least `top_p` keeps the best alone, and every `min_p` keeps what is as likely as the best."""
    logits = np.array(levels, np.float32) / 40
    several: list[dict[str, Any]] = [{"top_p": top_p}, {"top_p": top_p, "min_p": min_p}, {"min_p": 1.0}]
    for filters in several:
        request = Request(call("a", [1], temperature=temperature, seed=3, top_k=top_k, **filters))
        assert choose(row(logits, 4, full=True), request, NOBODY) == logits.argmax()


def test_below_the_normal_numbers_of_f32_a_temperature_is_greedy_by_name() -> None:
    """So that the device's best token is enough, as for 0."""
    assert SamplingParams(max_tokens=1, temperature=np.nextafter(least_normal, 0)).greedy
    assert not SamplingParams(max_tokens=1, temperature=least_normal).greedy
    assert not needs_logits(SamplingParams(max_tokens=1, temperature=1e-46), 0, num_candidates=1)


def test_weights_that_are_not_numbers_are_an_error() -> None:
    """Such as of a row whose best candidates are well but whose logits are not."""
    spoiled = LOGITS.copy()
    spoiled[2] = np.nan
    candidates = Candidates(LOGITS[[1, 4]], np.array([1, 4]), spoiled)
    with pytest.raises(InvocationError, match="finite"):
        choose(candidates, Request(call("a", [1], temperature=1.0)), NOBODY)


def test_min_p_is_relative_to_the_best() -> None:
    threshold = float(np.exp(2.0 - 3.0)) - 0.01
    assert np.flatnonzero(draws(1000, full=True, temperature=1.0, min_p=threshold)).tolist() == [1, 3, 4]


def test_a_draw_depends_on_the_seed_and_the_index_alone() -> None:
    def draw(seed: int, index: int) -> int:
        request = Request(call("a", [1], max_tokens=99, temperature=3.0, seed=seed))
        request.tokens += [0] * index
        return choose(row(full=True), request, NOBODY)

    first = [draw(1, i) for i in range(40)]
    assert first == [draw(1, i) for i in range(40)]
    assert first != [draw(2, i) for i in range(40)]
    assert len(set(first)) > 2


def test_banned_tokens_until_min_tokens() -> None:
    request = Request(call("a", [1], max_tokens=4, min_tokens=1, stop_token_ids=frozenset({4})))
    banned = banned_tokens(request, frozenset({1}))
    assert banned == {1, 4}
    assert choose(row(), request, banned) == 3
    request.tokens.append(0)
    assert banned_tokens(request, frozenset({1})) == frozenset()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    spoiled = np.full(6, bad, np.float32)
    with pytest.raises(InvocationError, match="finite"):
        choose(row(spoiled), Request(call("a", [1])), NOBODY)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_one_logit_that_is_no_number_is_an_error_though_it_is_not_among_the_best(
    params: dict[str, Any],
) -> None:
    spoiled = LOGITS.copy()
    spoiled[2] = np.nan
    best = np.argsort(-LOGITS, kind="stable")[:3]
    for candidates in (
        Candidates(LOGITS[best], best, spoiled),
        Candidates(np.empty(0), np.empty(0, np.int64), spoiled),
    ):
        assert np.isnan(candidates.best)
        with pytest.raises(InvocationError, match="finite"):
            choose(candidates, Request(call("a", [1], **params)), NOBODY)


@pytest.mark.parametrize(
    ("params", "banned", "needed"),
    [
        ({"temperature": 0}, 0, False),
        ({"temperature": 0}, 3, False),
        ({"temperature": 0}, 4, True),
        ({"temperature": 1, "top_k": 4}, 0, False),
        ({"temperature": 1, "top_k": 4}, 1, True),
        ({"temperature": 1, "top_k": 4, "top_p": 0.5}, 0, False),
        ({"temperature": 1, "top_p": 0.5}, 0, True),
        ({"temperature": 1, "top_k": 5}, 0, True),
        ({"temperature": 0, "logprobs": 0}, 0, True),
    ],
)
def test_logits_are_needed_only_when_the_candidates_do_not_decide(
    params: dict[str, float], banned: int, needed: bool
) -> None:
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    assert needs_logits(sampling, banned, num_candidates=4) is needed


@given(
    st.lists(st.integers(-40, 40), min_size=4, max_size=12, unique=True),
    st.integers(1, 4),
    st.floats(0.1, 1),
    st.integers(0, 2**63 - 1),
)
def test_candidates_decide_as_the_whole_row_would(
    levels: list[int], top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(levels, np.float32) / 8
    request = Request(call("a", [1], temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
    assert choose(row(logits, 4), request, NOBODY) == choose(row(logits, 4, full=True), request, NOBODY)


def kept_by_the_rules(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Sorted whole; the borders are a little wider than asked for, so that rounding does not matter."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    keep = (np.cumsum(weights) - weights < (top_p + 1e-4) * weights.sum()) & (weights > min_p - 1e-4)
    return set(order[keep].tolist())


@given(
    st.integers(0, 2**32 - 1),
    st.integers(5, 900),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([0, 0, 1, 3, 100]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    st.sampled_from([0, 4]),
)
def test_a_draw_is_among_what_the_filters_keep(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float, num_candidates: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    request = Request(
        call("a", [1], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    )
    candidates = row(logits, num_candidates, full=True)
    token = choose(candidates, request, NOBODY)
    assert token in kept_by_the_rules(logits, temperature, top_k, top_p, min_p)
    banned = frozenset({token, int(logits.argmax())})
    assert choose(candidates, request, banned) not in banned


def test_logprobs() -> None:
    got = logprobs_of(LOGITS, 3, 2)
    expected = np.log(softmax(LOGITS.astype(np.float64)))
    assert got.logprob == pytest.approx(expected[3])
    assert [token for token, _ in got.top] == [1, 4]
    assert got.top[0][1] == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("seed", -1),
        ("logprobs", 21),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        SamplingParams(**{"max_tokens": 4, field: value})  # type: ignore[arg-type]
    assert raised.value.param == field
