"""Scores of experts against their definition, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.feed_forward import MoE, route


@given(
    seed=st.integers(0, 1000),
    groups=st.sampled_from([1, 2, 3, 4, 6]),
    kept=st.integers(1, 6),
    summed=st.integers(1, 2),
    per_token=st.integers(1, 2),
    sigmoid=st.booleans(),
)
def test_a_token_uses_the_preferred_experts_of_the_best_groups(
    seed: int, groups: int, kept: int, summed: int, per_token: int, sigmoid: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits, bias = rng.standard_normal((5, 12)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
    kept = min(kept, groups)
    scores = ExpertScores(is_sigmoid=sigmoid, bias=True, groups=groups, kept_groups=kept, summed=summed)
    experts = MoE(count=12, per_token=per_token, features=16, scores=scores, scale=2.5)
    chosen, weights = route(experts, logits, bias)
    for token, row in enumerate(logits.astype(np.float64)):
        own = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row) / np.exp(row).sum()
        size = 12 // groups
        preferred = [(own[e] + bias[e], e) for e in range(12)]
        of_groups = [sorted(preferred[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        ranked = sorted(of_groups, key=lambda its: sum(value for value, _ in its[:summed]), reverse=True)
        best = sorted((each for its in ranked[:kept] for each in its), reverse=True)[:per_token]
        assert [e for _, e in best] == chosen[token].tolist()
        shares = np.array([own[e] for _, e in best])
        np.testing.assert_allclose(weights[token], 2.5 * shares / shares.sum(), rtol=1e-5)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_without_a_bias_and_groups_a_softmax_gives_the_same_as_no_scores(is_normalised: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((7, 9)).astype(np.float32)
    plain = MoE(count=9, per_token=3, features=16, is_normalised=is_normalised)
    scored = MoE(
        count=9,
        per_token=3,
        features=16,
        is_normalised=is_normalised,
        scores=ExpertScores(is_sigmoid=False),
    )
    for one, other in zip(route(plain, logits), route(scored, logits), strict=True):
        np.testing.assert_array_equal(one, other)
