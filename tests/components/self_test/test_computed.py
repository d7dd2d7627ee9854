from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.components.sampling.logprobs import terms_of
from shortfin_apps.llm.components.self_test.computed import (
    Computed,
    compare_row,
    drawn_as_seen,
    logprobs_as_seen,
    with_draw,
)
from shortfin_apps.llm.contract.abi import NO_LOGIT
from shortfin_apps.llm.contract.self_test_file import ExpectedLogits, SelfTestFile

LOGITS = np.array([0.5, -1.0, 3.0, 2.0, -0.25, 1.5, 0.0, 1.0], np.float32)
ORDER = np.argsort(-LOGITS)
EXPECTED = ExpectedLogits(
    position=4,
    sampled=tuple(LOGITS[:6].tolist()),
    best_ids=tuple(ORDER[:4].tolist()),
    best=tuple(LOGITS[ORDER[:4]].tolist()),
)
FILE = SelfTestFile(
    format_version=2,
    stride=4,
    pools={"whole": (0,)},
    tolerance=0.05,
    sample_ids=tuple(range(6)),
    prompts=(),
)


def compared(logits: npt.NDArray[np.float32]) -> Computed:
    ids = np.argsort(-logits, kind="stable")[:3]
    return compare_row("decode_bs1", 0, 0, EXPECTED, FILE, logits, logits[ids], ids)


def test_what_is_expected_passes() -> None:
    row = compared(LOGITS)
    assert (row.error, row.problem, row.position) == (0, None, 4)
    assert row.passes(0.0)


def test_an_error_is_in_deviations_of_the_logits() -> None:
    row = compared(LOGITS + np.float32(0.1))
    assert row.error == pytest.approx(0.1 / np.std(LOGITS[:6]), rel=1e-5)
    assert row.bits != compared(LOGITS).bits


def test_tokens_that_a_draft_cannot_have_are_no_part_of_the_deviation() -> None:
    """Or nothing would be wrong with the others."""
    sampled = (*EXPECTED.sampled[:4], NO_LOGIT, NO_LOGIT)
    logits = np.array([*sampled, 1.5, 1.0], np.float32)
    ids = np.argsort(-logits, kind="stable")
    expected = replace(
        EXPECTED, sampled=sampled, best_ids=tuple(ids[:4].tolist()), best=tuple(logits[ids[:4]].tolist())
    )
    moved = logits + np.where(logits == NO_LOGIT, 0, np.float32(0.1))
    rows = (
        compare_row("draft_bs1", 0, 0, expected, FILE, each, each[ids[:3]], ids[:3])
        for each in (logits, moved)
    )
    assert [row.error for row in rows] == [0, pytest.approx(0.1 / np.std(sampled[:4]), rel=1e-5)]


def test_logits_that_are_not_finite_fail() -> None:
    logits = LOGITS.copy()
    logits[7] = np.nan  # that is neither sampled nor among the best
    assert not compared(logits).passes(9.0)


def test_a_token_that_nobody_sampled_may_not_be_among_the_best() -> None:
    logits = LOGITS.copy()
    logits[6] = 1.1  # a little
    assert compared(logits).problem is None
    logits[6] = 9.0
    assert "token 6 is among the best" in str(compared(logits).problem)


@pytest.mark.parametrize(
    ("token_ids", "problem"),
    [
        ([2, 3, 9], "no distinct tokens"),
        ([2, 2, 3], "no distinct tokens"),
        ([3, 2, 5], "not the best"),
        ([2, 3, 7], "not the best"),
    ],
)
def test_wrong_candidates_are_a_problem(token_ids: list[int], problem: str) -> None:
    ids = np.array(token_ids)
    values = LOGITS[np.minimum(ids, 7)]
    row = compare_row("decode_bs1", 0, 0, EXPECTED, FILE, LOGITS, values, ids)
    assert problem in str(row.problem)


def test_values_of_candidates_are_logits() -> None:
    row = compare_row("decode_bs1", 0, 0, EXPECTED, FILE, LOGITS, LOGITS[ORDER[:3]] + 1, ORDER[:3])
    assert "not their logits" in str(row.problem)


def test_a_token_drawn_beside_logits_is_their_best_and_other_problems_come_first() -> None:
    right, wrong = compared(LOGITS), replace(compared(LOGITS), problem="other")
    assert with_draw(right, LOGITS, 2, None) == right
    assert "draws token 3" in str(with_draw(right, LOGITS, 3, "table").problem)
    assert with_draw(right, LOGITS, 2, "table").problem == "table"
    assert with_draw(wrong, LOGITS, 3, "table") == wrong


def test_a_token_drawn_of_logits_that_are_seen_is_their_best() -> None:
    assert drawn_as_seen("sample_bs1", 0, 0, 4, LOGITS, 2).problem is None
    assert "whose best is 2" in str(drawn_as_seen("sample_bs1", 0, 0, 4, LOGITS, 3).problem)


@pytest.mark.parametrize("field", ["mass", "logit", "rank"])
def test_terms_of_logprobs_are_those_of_the_logits_to_the_bit(field: str) -> None:
    right = terms_of(LOGITS, 3, 4)
    assert logprobs_as_seen("logprobs_bs1", 0, 0, 4, LOGITS, 3, right).problem is None
    wrong = right._replace(**{field: getattr(right, field) + 1})
    assert "token 3" in str(logprobs_as_seen("logprobs_bs1", 0, 0, 4, LOGITS, 3, wrong).problem)
    spoiled = np.full_like(LOGITS, np.nan)
    assert "finite" in str(logprobs_as_seen("logprobs_bs1", 0, 0, 4, spoiled, 3, right).problem)
