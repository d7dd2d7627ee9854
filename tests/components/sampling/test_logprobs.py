"""Log-probabilities against a log-softmax in f64, and terms of a device against terms of the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.sampling.candidates import Candidates, Drawn, Floats
from shortfin_apps.llm.components.sampling.logprobs import (
    computed_terms,
    row_logprobs,
    terms_of,
    token_logprobs,
)
from shortfin_apps.llm.components.sampling.weights import PART, scale_of
from shortfin_apps.llm.contract.abi import TermField
from shortfin_apps.llm.contract.sampling_rule import UNIT_SCALE
from tests.components.sampling.rows import LOGITS

TOLERANCE = 1e-6  # that sampling_rule.py states, in nats


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def whole(logits: Floats) -> Candidates:
    return Candidates(np.empty(0), np.empty(0, np.int64), logits)


def test_the_scale_is_that_of_temperature_1() -> None:
    assert scale_of(1.0) == np.float32(UNIT_SCALE) == UNIT_SCALE


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 5, 1000, PART + 1, 3 * PART]),
    st.sampled_from([0.0, 0.01, 1.0, 10.0, 1000.0]),
    st.booleans(),
    st.sampled_from([0, 1, 4]),
)
def test_they_are_those_of_a_log_softmax(
    seed: int, size: int, spread: float, is_rounded: bool, num_top: int
) -> None:
    """Narrow and wide rows, with ties and with banned tokens."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 1, size) * spread).astype(np.float32)
    if is_rounded:
        logits = np.round(logits)
    logits[rng.integers(0, size, size // 3)] = -np.inf
    logits[rng.integers(size)] = 1.0
    token_id, expected = int(rng.integers(size)), log_softmax(logits)
    got = row_logprobs(whole(logits), token_id, num_top)
    scale = max(1.0, spread)
    assert got.logprob == pytest.approx(expected[token_id], abs=TOLERANCE * scale)
    assert got.rank == 1 + np.count_nonzero(logits > logits[token_id])
    best = np.argsort(-logits, kind="stable")[:num_top]
    assert [each for each, _ in got.top] == best.tolist()
    assert [each for _, each in got.top] == pytest.approx(expected[best], abs=TOLERANCE * scale)


def test_terms_of_a_device_give_the_same_bits_as_the_row() -> None:
    expected = terms_of(LOGITS, 3, 4)
    terms = np.zeros((len(TermField), 2), np.int64)
    terms[:, 1] = [expected.mass, LOGITS[3].view(np.int32), expected.rank]
    values = np.stack([np.zeros_like(expected.values), expected.values])
    indices = np.stack([np.zeros_like(expected.token_ids), expected.token_ids])
    drawn = Drawn(3, terms=computed_terms(terms, values, indices)[1])
    for num_top in range(5):
        assert row_logprobs(drawn, 3, num_top) == row_logprobs(whole(LOGITS), 3, num_top)


def test_a_negative_logit_is_read_from_its_bits() -> None:
    terms = np.array([[1 << 44], [int(np.float32(-2.5).view(np.int32))], [2]])
    [found] = computed_terms(terms, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64))
    assert (found.logit, found.rank) == (-2.5, 2)
    assert token_logprobs(found, 1).top == ((0, 0.0),)
