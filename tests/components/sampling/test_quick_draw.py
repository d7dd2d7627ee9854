"""Draws by floats against draws by integers, everywhere and where they are the most likely to differ."""

from __future__ import annotations

from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.sampling import draw as draw_module
from shortfin_apps.llm.components.sampling import quick_draw
from shortfin_apps.llm.components.sampling.draw import BLOCK, draw
from shortfin_apps.llm.components.sampling.quick_draw import (
    APART,
    LEAST_ORDERED,
    RELATIVE_ERROR,
    UNIT,
    draw_quickly,
)
from shortfin_apps.llm.components.sampling.weights import scale_of, share_of, weights_of
from shortfin_apps.llm.contract.sampling_rule import FRACTION_BITS, LOWEST_EXPONENT, WEIGHT_BITS
from tests.components.sampling.rule import drawn_by_the_rule

Floats = npt.NDArray[np.float32]


def row_of(seed: int, size: int, levels: int) -> Floats:
    random = np.random.default_rng(seed)
    logits = (random.integers(0, levels, size) * (30 / levels)).astype(np.float32)
    logits[random.random(size) < 0.1] = -np.inf
    logits[size // 2] = 1.0
    return logits


rows = st.builds(
    row_of, st.integers(0, 2**32 - 1), st.integers(1, 5 * BLOCK), st.sampled_from([2, 40, 1 << 20])
)
seeds = st.integers(0, 2**63 - 1)
temperatures = st.sampled_from([1e-30, 0.3, 1.0, 3.0, 1e30])


@given(rows, temperatures, seeds)
def test_a_token_is_that_of_integers_or_none(logits: Floats, temperature: float, seed: int) -> None:
    best, scale = float(logits.max()), scale_of(temperature)
    expected = draw(weights_of(logits, best, scale), seed, 3)
    assert draw_quickly(logits, best, scale, 1.0, seed, 3) in (expected, None)


@given(rows, st.sampled_from([0.3, 1.0, 3.0, 1e30]), seeds, st.floats(0, 1), st.booleans())
def test_so_it_is_with_top_p(
    logits: Floats, temperature: float, seed: int, top_p: float, is_at_end: bool
) -> None:
    """Also where top-p ends with a token, or just not: shares are multiples of 2**-SHARE_BITS."""
    best, scale = float(logits.max()), scale_of(temperature)
    weights = weights_of(logits, best, scale).tolist()
    if is_at_end:
        heaviest = sorted(weights, reverse=True)
        top_p = sum(heaviest[: max(1, int(top_p * len(heaviest)))]) / sum(heaviest)
    top_p = max(top_p, 2.0**-40)
    expected = drawn_by_the_rule(weights, share_of(top_p), 0, seed, 3)
    assert draw_quickly(logits, best, scale, top_p, seed, 3) in (expected, None)


@given(rows, temperatures, st.integers(0, 5 * BLOCK - 1), st.integers(-2, 2))
def test_so_it_is_where_one_weight_ends(logits: Floats, temperature: float, place: int, off: int) -> None:
    """Words whose draws fall upon the end of a weight, or beside it."""
    best, scale = float(logits.max()), scale_of(temperature)
    weights = weights_of(logits, best, scale)
    ends = np.cumsum(weights)
    at_end = -(-(int(ends[place % len(ends)]) << 64) // int(ends[-1]))
    word = min(max(at_end + off, 0), 2**64 - 1)
    with (
        mock.patch.object(draw_module, "random_word", return_value=word),
        mock.patch.object(quick_draw, "random_word", return_value=word),
    ):
        assert draw_quickly(logits, best, scale, 1.0, 0, 0) in (draw(weights, 0, 0), None)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_hardly_any_draw_needs_integers(top_p: float) -> None:
    """Also not from a row whose tokens are all as likely, which is the worst."""
    random = np.random.default_rng(1)
    usual, flat = random.normal(0, 4, 30_000).astype(np.float32), np.zeros(30_000, np.float32)
    for logits in (usual, flat):
        best = float(logits.max())
        drawn = [draw_quickly(logits, best, scale_of(1), top_p, 7, index) for index in range(500)]
        assert drawn.count(None) < 5
        assert len(set(drawn)) > 50


@pytest.mark.parametrize("whole", [0, 1, 20, 43, 62])
def test_the_error_of_a_weight_is_as_stated(whole: int) -> None:
    """Every fraction that there is."""
    lowest = np.float32(-(whole + 1 << FRACTION_BITS))
    exponents = lowest + np.arange(1 << FRACTION_BITS, dtype=np.float32)
    exact = weights_of(exponents, 0.0, np.float32(1)) / 2.0**WEIGHT_BITS
    estimated = quick_draw._estimated_weights(exponents, 0.0, np.float32(1))
    assert (np.abs(estimated - exact) <= RELATIVE_ERROR * estimated + UNIT).all()


def test_the_error_of_a_weight_that_is_none_is_a_unit() -> None:
    exponents = np.array([0, LOWEST_EXPONENT, 2.0 * LOWEST_EXPONENT, -np.inf], np.float32)
    assert (quick_draw._estimated_weights(exponents, 0.0, np.float32(1))[1:] < UNIT).all()


@pytest.mark.parametrize("whole", [0, 1, 20])
def test_from_the_least_that_is_ordered_on_integers_differ_as_floats_do(whole: int) -> None:
    """All exponents that f32 has between two whole ones."""
    lowest = np.float32(-(whole << FRACTION_BITS))
    exponents = np.unique(np.minimum(lowest + np.arange(1 << FRACTION_BITS, dtype=np.float32), 0))
    weights = weights_of(exponents, 0.0, np.float32(1))
    assert weights[0] >= LEAST_ORDERED * 2**WEIGHT_BITS
    assert (np.diff(weights) > 1).all()
    estimated = quick_draw._estimated_weights(exponents, 0.0, np.float32(1))
    assert (estimated[1:] > estimated[:-1] * APART).all()
