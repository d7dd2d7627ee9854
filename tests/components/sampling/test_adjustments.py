from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.adjustments import MinTokens
from tests.components.engine_fixture import call
from tests.components.sampling.rows import LOGITS, row

MIN_TOKENS = MinTokens(frozenset({1}))


def test_min_tokens_bans_what_would_end_the_request() -> None:
    request = Request(call("a", [1], max_tokens=4, min_tokens=1, stop_token_ids=frozenset({4, 99})))
    adjusted = MIN_TOKENS.apply(row(full=True), request)
    assert adjusted.token_ids.tolist() == [3, 0, 5, 2]
    assert adjusted.logits is not None
    assert np.flatnonzero(np.isinf(adjusted.logits)).tolist() == [1, 4]
    assert np.isfinite(LOGITS).all(), "the row itself is not written"


def test_min_tokens_is_off_once_there_are_so_many() -> None:
    params = call("a", [1], min_tokens=2, stop_token_ids=frozenset({4})).params
    assert [MIN_TOKENS.num_lost(params, num_generated) for num_generated in range(4)] == [2, 2, 0, 0]
