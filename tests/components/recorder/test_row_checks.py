from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.recorder.records import NOT_FINITE_ROW
from shortfin_apps.llm.components.recorder.row_checks import candidates_sums, logits_sum

VALUES, INDICES = np.array([3, 2], np.float32), np.array([7, 5], np.int64)


def test_sums_differ_where_candidates_do() -> None:
    first, same, other_value, other_index = candidates_sums(
        np.array([VALUES, VALUES, np.nextafter(VALUES, 9, dtype=np.float32), VALUES]),
        np.array([INDICES, INDICES, INDICES, INDICES[::-1]]),
        holds_nan=False,
    )
    assert first == same
    assert len({first, other_value, other_index}) == 3


def test_all_nans_are_the_same() -> None:
    nans = np.array([[0x7FC00001], [0x7FC00000], [0]], np.uint32).view(np.float32)
    *of_nans, finite = candidates_sums(nans, np.array([[1], [2], [3]]), holds_nan=True)
    assert of_nans == [NOT_FINITE_ROW] * 2
    assert finite != NOT_FINITE_ROW
    assert logits_sum(np.full(200, np.nan, np.float32)) == NOT_FINITE_ROW


def test_logits_of_another_context_have_another_sum() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 1000)).astype(np.float32)
    assert logits_sum(first) == logits_sum(first.copy()) != logits_sum(second)
