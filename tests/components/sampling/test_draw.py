from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.errors import InvocationError
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
