"""Weights against exponentials in f64, and the constants of the rule that a device follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.sampling.draw import random_word
from shortfin_apps.llm.components.sampling.weights import (
    least_weight,
    mass_within,
    scale_of,
    share_of,
    weights_of,
)
from shortfin_apps.llm.contract.sampling_rule import (
    FRACTION_BITS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    WEIGHT_BITS,
)

WORD = 2**64


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 100.0])
def test_weights_are_exponentials(temperature: float) -> None:
    logits = np.linspace(-8, 3, 10_001, dtype=np.float32)
    got = weights_of(logits, 3.0, scale_of(temperature)) / 2**WEIGHT_BITS
    expected = np.exp((logits.astype(np.float64) - 3) / temperature)
    # An exponent is rounded to a step of its fraction, and as f32; a weight to a whole number.
    relative = 2.0**-FRACTION_BITS + 2.0**-23 * 11 / temperature
    np.testing.assert_allclose(got, expected, rtol=relative, atol=2.0**-WEIGHT_BITS)


def test_the_polynomial_grows_from_one_and_stays_below_two() -> None:
    fractions = np.arange(-(2**FRACTION_BITS) + 1, 1, dtype=np.float32)
    weights = weights_of(fractions, 0.0, np.float32(1))
    assert weights[-1] == 2**WEIGHT_BITS
    assert weights[0] >= 2 ** (WEIGHT_BITS - 1)
    assert (np.diff(weights) >= 0).all()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.floats(1e-37, 100))
def test_weights_are_ordered_as_logits_are(logits: list[float], temperature: float) -> None:
    row = -np.sort(-np.array([*logits, -np.inf], np.float32))
    weights = weights_of(row, float(row[0]), scale_of(temperature))
    assert weights[0] == 2**WEIGHT_BITS
    assert (np.diff(weights) <= 0).all()
    assert weights[-1] == 0


def test_thresholds_are_in_the_units_of_weights() -> None:
    assert mass_within(share_of(1.0), 2**60 + 5) == 2**60 + 5
    assert mass_within(share_of(0.5), 1000) == 500
    assert mass_within(share_of(1e-300), 2**62) == 0
    assert least_weight(1.0) == 2**WEIGHT_BITS
    assert least_weight(1e-300) == 1


def philox(seed: int, index: int, attempt: int) -> int:
    """The first word, by the paper's definition and the constants of the rule."""
    counter, key = [index + 1, attempt, 0, 0], [seed, 0]
    for _ in range(PHILOX_ROUNDS):
        low, high = counter[0] * PHILOX_MULTIPLIERS[0], counter[2] * PHILOX_MULTIPLIERS[1]
        counter = [
            *(high // WORD ^ counter[1] ^ key[0], high % WORD),
            *(low // WORD ^ counter[3] ^ key[1], low % WORD),
        ]
        key = [(word + weyl) % WORD for word, weyl in zip(key, PHILOX_WEYL, strict=True)]
    return counter[0]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_random_words_are_philox(seed: int, index: int, attempt: int) -> None:
    assert random_word(seed, index, attempt) == philox(seed, index, attempt)
