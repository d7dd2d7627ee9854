from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.draw import BLOCK, place_in, sums_before_blocks
from shortfin_apps.llm.contract.errors import InvocationError
from tests.components.engine_fixture import call
from tests.components.sampling.rows import LOGITS, SAMPLER, draws, row, softmax


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    expected = softmax(LOGITS.astype(np.float64) / temperature)
    assert np.abs(draws(4000, full=True, temperature=temperature) - expected).max() < 0.03


def test_weights_that_are_not_finite_are_an_error() -> None:
    """A row's candidates can be finite when its logits are not."""
    spoiled = LOGITS.copy()
    spoiled[2] = np.nan
    candidates = Candidates(LOGITS[[1, 4]], np.array([1, 4]), spoiled)
    with pytest.raises(InvocationError, match="finite"):
        SAMPLER.sample(candidates, Request(call("a", [1], temperature=1.0)))


def test_a_draw_depends_on_the_seed_and_the_index_alone() -> None:
    def drawn(seed: int, index: int) -> int:
        request = Request(call("a", [1], max_tokens=99, temperature=3.0, seed=seed))
        request.token_ids += [0] * index
        return SAMPLER.sample(row(full=True), request)

    first = [drawn(1, i) for i in range(40)]
    assert first == [drawn(1, i) for i in range(40)]
    assert first != [drawn(2, i) for i in range(40)]
    assert len(set(first)) > 2


@given(
    st.lists(st.integers(0, 3) | st.integers(0, 2**44), min_size=1, max_size=3 * BLOCK),
    st.floats(0, 1, exclude_max=True),
)
def test_the_place_of_a_target_is_where_the_sum_passes_it(listed: list[int], share: float) -> None:
    weights = np.array([*listed, 1])
    ends = np.cumsum(weights)
    before = sums_before_blocks(weights)
    assert before[-1] == ends[-1]
    target = min(int(share * int(ends[-1])), int(ends[-1]) - 1)
    place, begin = place_in(weights, before, target)
    assert place == np.searchsorted(ends, target, side="right")
    assert begin == ends[place] - weights[place]
