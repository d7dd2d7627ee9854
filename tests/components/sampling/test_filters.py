from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.filters import kept
from tests.components.engine_fixture import call
from tests.components.sampling.rows import LOGITS, SAMPLER, draws, row, softmax

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
row_levels = st.lists(st.integers(-40, 40), min_size=4, max_size=12, unique=True)


def test_top_k_draws_from_the_best_k_only() -> None:
    got = draws(2000, temperature=1.0, top_k=2)
    assert np.flatnonzero(got).tolist() == [1, 4]
    assert got[1] == pytest.approx(softmax(LOGITS[[1, 4]])[0], abs=0.04)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    probs = softmax(LOGITS.astype(np.float64))
    assert np.flatnonzero(draws(500, full=True, temperature=1.0, top_p=probs[1] - 0.01)).tolist() == [1]
    assert np.flatnonzero(draws(500, full=True, temperature=1.0, top_p=probs[1] + 0.01)).tolist() == [1, 4]


@pytest.mark.parametrize("full", [True, False])
def test_the_smallest_top_p_keeps_the_best(full: bool) -> None:
    """In f32, this times the mass is 0."""
    assert draws(5, full=full, temperature=1.0, top_p=2.2e-109)[1] == 1


def test_min_p_is_relative_to_the_best() -> None:
    threshold = float(np.exp(2.0 - 3.0)) - 0.01
    assert np.flatnonzero(draws(1000, full=True, temperature=1.0, min_p=threshold)).tolist() == [1, 3, 4]


@given(
    st.floats(min_value=5e-324, max_value=1e-30, allow_subnormal=True)
    | st.sampled_from([5e-324, 1e-320, 1e-46, 1e-45, 1e-39, SMALLEST_NORMAL, 2 * SMALLEST_NORMAL]),
    row_levels,
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": 1e-300}, {"min_p": 0.5}, {"min_p": 1e-300}]),
    st.sampled_from([1.0, 1e30, 1e38]),
    st.booleans(),
)
def test_the_smallest_temperatures_are_greedy(
    temperature: float, levels: list[int], filters: dict[str, Any], scale: float, full: bool
) -> None:
    """In f32 the smallest are 0, and 0 / 0 would be a weight; others scale logits beyond its range."""
    logits = np.array(levels, np.float32) * np.float32(scale / 40)
    request = Request(call("a", [1], temperature=temperature, seed=3, **filters))
    assert SAMPLER.sample(row(logits, 4, full=full), request) == logits.argmax()


@given(
    st.floats(min_value=5e-324, max_value=1e-10, allow_subnormal=True),
    st.floats(min_value=0, max_value=1, allow_subnormal=True),
    row_levels,
    st.sampled_from([0.3, 1.0, 100.0]),
    st.sampled_from([0, 3, 2**70]),
)
def test_the_smallest_filters_are_followed(
    top_p: float, min_p: float, levels: list[int], temperature: float, top_k: int
) -> None:
    """The smallest `top_p` keeps the best alone; no `min_p` drops what is as likely as the best."""
    logits = np.array(levels, np.float32) / 40
    several: list[dict[str, Any]] = [{"top_p": top_p}, {"top_p": top_p, "min_p": min_p}, {"min_p": 1.0}]
    for filters in several:
        request = Request(call("a", [1], temperature=temperature, seed=3, top_k=top_k, **filters))
        assert SAMPLER.sample(row(logits, 4, full=True), request) == logits.argmax()


@given(
    row_levels,
    st.integers(1, 4),
    st.floats(0.1, 1),
    st.integers(0, 2**63 - 1),
)
def test_candidates_decide_as_the_whole_row_would(
    levels: list[int], top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(levels, np.float32) / 8
    request = Request(call("a", [1], temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
    assert SAMPLER.sample(row(logits, 4), request) == SAMPLER.sample(row(logits, 4, full=True), request)


def kept_by_the_rules(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """By sorting the whole row, with borders a little too wide, so that rounding does not matter."""
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
    token_id = SAMPLER.sample(candidates, request)
    assert token_id in kept_by_the_rules(logits, temperature, top_k, top_p, min_p)
    banned = frozenset({token_id, int(logits.argmax())})
    params = replace(request.call.params, min_tokens=1, stop_token_ids=banned)
    banning = Request(replace(request.call, params=params))
    assert SAMPLER.sample(candidates, banning) not in banned


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=12),
    st.floats(0.01, 0.99),
    st.sampled_from([{}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_p": 0.7, "min_p": 0.1}]),
)
def test_typical_p_keeps_what_transformers_keeps(
    levels: list[int], mass: float, others: dict[str, Any]
) -> None:
    """The least set of the most typical tokens that reaches the mass, of what the other filters keep."""
    logits = np.array(levels, np.float32) / 8
    all_probs = softmax(logits.astype(np.float64))
    order = np.argsort(-all_probs, kind="stable")
    before = np.cumsum(all_probs[order]) - all_probs[order]
    top_p, min_p = others.get("top_p", 1.0), others.get("min_p", 0.0)
    assume(np.abs(before - top_p).min() > 1e-6 and np.abs(all_probs / all_probs.max() - min_p).min() > 1e-6)
    last = order[np.count_nonzero(before < top_p) - 1]
    likely = np.flatnonzero((all_probs >= all_probs[last]) & (all_probs >= min_p * all_probs.max()))
    assume(top_p == 1 or np.count_nonzero(all_probs == all_probs[last]) == 1)
    probs = all_probs[likely] / all_probs[likely].sum()
    distance = np.abs(-np.log(probs) + (probs * np.log(probs)).sum())
    reached = np.cumsum(probs[np.argsort(distance)])
    farthest = np.sort(distance)[np.count_nonzero(reached[:-1] < mass)]
    gaps = np.abs(distance - farthest)
    assume(np.abs(reached - mass).min() > 1e-6 and ((gaps < 1e-12) | (gaps > 1e-6)).all())
    expected = set(likely[distance <= farthest + 1e-9].tolist())
    params: dict[str, Any] = {"temperature": 1.0, "typical_p": mass, **others}
    candidates = row(logits, len(logits))
    ids, weights = kept(candidates, candidates.best, call("a", [1], **params).params)
    assert set(ids[: len(weights)][weights > 0].tolist()) == expected
    whole = row(logits, len(logits), full=True)
    drawn = [SAMPLER.sample(whole, Request(call("a", [1], seed=seed, **params))) for seed in range(20)]
    assert expected.issuperset(drawn)
