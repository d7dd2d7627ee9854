"""Tokens drawn from whole rows, against a brute-force reading of the rule, and against the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.weights import PART, least_weight, scale_of, share_of, weights_of
from shortfin_apps.llm.components.sampling.whole_row import draw_from_row
from tests.components.sampling.rule import drawn_by_the_rule

DRAWS = 4000
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}  # by degrees of freedom

Floats = npt.NDArray[np.float32]


def params_of(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)


def drawn(logits: Floats, params: SamplingParams, seed: int, index: int) -> int:
    return draw_from_row(logits, float(logits.max()), params, seed, index)


def by_the_rule(logits: Floats, params: SamplingParams, seed: int, index: int) -> int:
    weights = weights_of(logits, float(logits.max()), scale_of(params.temperature)).tolist()
    return drawn_by_the_rule(weights, share_of(params.top_p), least_weight(params.min_p), seed, index)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.sampled_from([0.1, 0.95, 0.99]),
    st.sampled_from([1e-30, 0.3, 1.0, 100.0]),
    st.sampled_from([1.0, 1 - 1e-12, 0.9, 0.3, 1e-300]),
    st.sampled_from([0.0, 1e-300, 0.05, 0.9, 1.0]),
    st.sampled_from([4, 40, 4000]),
    st.integers(0, 2**63 - 1),
)
def test_the_token_is_that_of_the_rule(
    of_logits: int,
    size: int,
    banned: float,
    temperature: float,
    top_p: float,
    min_p: float,
    levels: int,
    seed: int,
) -> None:
    """With as few levels as here, many logits are equal; of most tokens banned, few are left."""
    logits = (np.random.default_rng(of_logits).integers(0, levels, size) * (8 / levels)).astype(np.float32)
    logits[np.random.default_rng(seed).random(size) < banned] = -np.inf
    logits[size // 2] = 1.0
    params = params_of(temperature=temperature, top_p=top_p, min_p=min_p)
    assert drawn(logits, params, seed, 3) == by_the_rule(logits, params, seed, 3)


def test_a_row_of_several_parts_is_drawn_from_as_a_whole() -> None:
    logits = np.random.default_rng(1).normal(0, 1, 2 * PART + 77).astype(np.float32)
    for seed in range(5):
        for params in (params_of(), params_of(top_p=0.5), params_of(min_p=0.1, top_p=0.9)):
            assert drawn(logits, params, seed, 0) == by_the_rule(logits, params, seed, 0)


@pytest.mark.parametrize(
    ("fields", "passing"),
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"temperature": 2.0, "min_p": 0.25}, 5),
        ({"top_p": 0.9}, 4),
        ({"top_p": 0.5}, 2),
        ({"temperature": 2.0, "top_p": 0.7, "min_p": 0.1}, 3),
        ({"temperature": 3.0, "top_p": 0.3, "min_p": 0.9}, 1),
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, Any], passing: int) -> None:
    """Chi-square at 0.999: the `passing` best tokens, by their probabilities."""
    logits = np.array([0.5, 3.0, -1.0, 2.0, 2.5, 1.0], np.float32)
    params = params_of(**fields)
    counts = np.bincount([drawn(logits, params, 7, index) for index in range(DRAWS)], minlength=6)
    best = np.argsort(-logits)[:passing]
    weights = np.exp(logits[best].astype(np.float64) / params.temperature)
    expected = DRAWS * weights / weights.sum()
    assert counts[best].sum() == DRAWS
    if passing > 1:
        assert ((counts[best] - expected) ** 2 / expected).sum() < CHI_SQUARE_999[passing - 1]


def test_tokens_as_likely_as_the_last_that_passes_pass_too() -> None:
    logits = np.array([1.0, 2.0, 1.0, 0.0], np.float32)
    tokens = {drawn(logits, params_of(top_p=0.61), 1, index) for index in range(200)}
    assert tokens == {0, 1, 2}


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.sampled_from([0.3, 0.9, 1.0]))
def test_banned_tokens_make_no_difference_to_a_typical_draw(seed: int, size: int, top_p: float) -> None:
    """The few that are left are drawn from as if there were no others."""
    few = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    places = np.sort(np.random.default_rng(seed).permutation(20 * size)[:size])
    logits = np.full(20 * size, -np.inf, np.float32)
    logits[places] = few
    params = params_of(typical_p=0.6, top_p=top_p)
    assert drawn(logits, params, seed, 1) == places[drawn(few, params, seed, 1)]
