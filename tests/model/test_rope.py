from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shortfin_apps.llm.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.compiled_model import TINY
from tests.builder.specs import changed

THETA = 10000.0
PLAIN = THETA ** -(np.arange(0, 64, 2) / 64)
LONG = LongRopeScaling(
    short_factors=(1.0,) * 32,
    long_factors=tuple(np.linspace(1, 8, 32).tolist()),
    original_max_position_embeddings=256,
    attention_factor=1.2,
)
SCALINGS: list[RopeScaling] = [
    LinearScaling(factor=8.0),
    Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    ),
    YarnScaling(factor=8.0, original_max_position_embeddings=256, attention_factor=1.1),
    YarnScaling(factor=8.0, original_max_position_embeddings=256, attention_factor=1.1, truncate=False),
    LONG,
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_frequency_grows_or_shrinks_by_more_than_the_factor(scaling: RopeScaling) -> None:
    scaled = scaling.scaled(PLAIN, THETA, 512)
    assert np.all(scaled <= PLAIN * (1 + 1e-12))
    assert np.all(scaled >= PLAIN / 8 * (1 - 1e-12))
    assert scaled[-1] == pytest.approx(PLAIN[-1] / 8)


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_the_quickest_is_kept(scaling: RopeScaling) -> None:
    assert scaling.scaled(PLAIN, THETA, 512)[0] == pytest.approx(PLAIN[0])


@given(context=st.integers(1, 1024))
def test_longrope_has_its_short_factors_within_the_original_context(context: int) -> None:
    expected = PLAIN if context <= 256 else PLAIN / np.array(LONG.long_factors)
    np.testing.assert_array_equal(LONG.scaled(PLAIN, THETA, context), expected)


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_a_spec_is_read_back_with_its_scaling(scaling: RopeScaling | None) -> None:
    spec, json = changed(TINY, {"rope": Rope(scaling=scaling)}), TypeAdapter(ModelSpec)
    assert json.validate_json(json.dump_json(spec)) == spec


def test_a_context_that_is_no_longer_has_no_temperature() -> None:
    assert yarn_attention_factor(1.0) == longrope_attention_factor(1.0, 4096) == 1.0
