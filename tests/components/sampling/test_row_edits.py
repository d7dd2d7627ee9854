"""Edits give the logits that the host's adjustments give, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.request import Request, TokenCounts
from shortfin_apps.llm.components.sampling.adjustments import adjustments, whole_row
from shortfin_apps.llm.components.sampling.row_edits import RowEdits, bitmask_of, joined, joined_bitmasks
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import KEPT, NOT_SEEN, EditField, PenaltyField
from tests.components.engine_fixture import call
from tests.components.fake_device import edited

VOCAB = 40
ENDS = frozenset({1, 7})
TOKENS = st.integers(0, VOCAB + 3)  # a tokenizer may know tokens that the model does not
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.5, 2.0),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.lists(st.tuples(TOKENS, st.floats(-100, 100)), max_size=8).map(tuple),
    "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    "allowed_token_ids": st.frozensets(TOKENS, min_size=1),
    "min_tokens": st.integers(0, 9),
}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    params = {name: draw(values) for name, values in PARAMS.items() if draw(st.booleans())}
    request = Request(call("a", draw(st.lists(TOKENS, min_size=1, max_size=9)), 40, **params))
    request.token_ids += draw(st.lists(TOKENS, max_size=9))
    return request


def seen_by(request: Request) -> TokenCounts:
    request.token_counts.catch_up(request.token_ids)
    return request.token_counts


@given(requests(), st.integers(0, 2**32))
def test_logits_are_those_of_the_host(request: Request, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, VOCAB).astype(np.float32)
    expected, edits = whole_row(logits), RowEdits()
    for each in adjustments(ENDS):
        if each.num_lost(request.call.params, request.num_generated):
            expected = each.apply(expected, request)
            assert each.edit(edits, request)
    assert expected.logits is not None
    penalties = np.array(edits.penalties, np.float32)
    allowed = None if edits.allowed is None else joined_bitmasks([edits.allowed], VOCAB)[0]
    counts = np.full(VOCAB, NOT_SEEN)
    for seen in (seen_by(request), None):  # counts that the edits set are kept by further edits
        columns = joined([edits], [seen], VOCAB)
        got = edited(logits, columns[1:].T.tolist(), counts, penalties, allowed)
        np.testing.assert_array_equal(got, expected.logits)


def test_a_token_that_is_banned_stays_so_whatever_its_bias() -> None:
    for names in (("ban", "bias"), ("bias", "ban")):
        edits = RowEdits()
        for name in names:
            edits.ban([3]) if name == "ban" else edits.bias([3], [100.0])
        assert joined([edits], [None], 8)[EditField.BIAS].view(np.float32).tolist() == [-np.inf]


def test_a_token_that_was_seen_and_has_a_bias_has_one_edit() -> None:
    edits, seen = RowEdits(), TokenCounts(num_prompt=0)
    seen.catch_up([4, 4, 2])
    edits.penalise(PenaltyField.FREQUENCY, 0.1)
    edits.bias([2, 6], [1.0, 2.0])
    columns = joined([edits], [seen], 8)
    assert columns[EditField.TOKEN_ID].tolist() == [4, 2, 6]
    assert columns[EditField.COUNT].tolist() == [2, 1, KEPT]
    assert columns[EditField.BIAS].view(np.float32).tolist() == [0.0, 1.0, 2.0]
    kept = joined([edits], [None], 8)
    assert kept[[EditField.TOKEN_ID, EditField.COUNT]].tolist() == [[2, 6], [KEPT, KEPT]]


def test_a_token_of_the_prompt_is_edited_only_by_what_changes_it() -> None:
    for field, penalty, sent in (
        (PenaltyField.PRESENCE, 0.5, [3, 2]),
        (PenaltyField.REPETITION, 1.5, [1, 2, 3]),
    ):
        edits, seen = RowEdits(), TokenCounts(num_prompt=3)
        seen.catch_up([1, 2, 3, 3])
        edits.penalise(field, penalty)
        edits.bias([2], [0.5])
        assert sorted(joined([edits], [seen], 8)[EditField.TOKEN_ID].tolist()) == sorted(sent)


def test_bitmasks_leave_what_all_of_them_allow() -> None:
    edits = RowEdits()
    assert edits.allowed is None
    edits.allow(b"\x0f\xff\xff\xff\xff")
    edits.allow(b"\x3c\x01")
    assert edits.allowed is not None
    np.testing.assert_array_equal(joined_bitmasks([edits.allowed], 40), [[0x10C, 0]])
    np.testing.assert_array_equal(joined_bitmasks([edits.allowed], 3), [[0x10C]])


@given(st.frozensets(st.integers(0, 20), max_size=5), st.frozensets(st.integers(0, 24), max_size=4))
def test_rows_may_lose_all_tokens_only_if_as_many_are_banned_as_allowed(
    allowed: frozenset[int], banned: frozenset[int]
) -> None:
    edits = RowEdits()
    edits.ban(banned)
    assert not edits.may_ban_all()
    edits.allow(bitmask_of(allowed))
    assert edits.may_ban_all() is (len(allowed) <= len(banned))


@pytest.mark.parametrize(
    ("params", "num_drawing", "is_edited"),
    [
        ({"presence_penalty": 1.0}, 0, True),
        ({"presence_penalty": 1.0, "temperature": 0.0}, 0, True),
        ({"presence_penalty": 1.0, "top_k": 4}, 0, True),
        ({"presence_penalty": 1.0, "top_k": 5}, 0, False),
        ({"presence_penalty": 1.0, "typical_p": 0.5}, 0, False),
        ({"presence_penalty": 1.0, "logprobs": 0}, 0, True),
        ({"min_tokens": 2}, 1, True),
        ({"min_tokens": 2}, 2, False),
        ({}, 0, False),
        ({"forced_token_ids": (3,)}, 0, False),
    ],
)
def test_which_rows_the_device_adjusts(params: dict[str, Any], num_drawing: int, is_edited: bool) -> None:
    request = Request(call("a", [1, 2], 8, **{"temperature": 1.0, **params}))
    sampler = Sampler(ENDS, num_candidates=4, draws_rows=True, adjusts_rows=True)
    assert (sampler.row_edits(request, num_drawing) is not None) is is_edited
    without = Sampler(ENDS, num_candidates=4, draws_rows=True)
    assert without.row_edits(request, num_drawing) is None


@given(st.lists(requests(), min_size=1, max_size=5))
def test_rows_joined_are_the_rows_one_by_one(rows: list[Request]) -> None:
    of_rows = []
    for request in rows:
        of_rows.append(RowEdits())
        for each in adjustments(ENDS):
            if each.num_lost(request.call.params, request.num_generated):
                each.edit(of_rows[-1], request)
    seen = [seen_by(request) if row % 2 else None for row, request in enumerate(rows)]
    together = joined(of_rows, seen, VOCAB)
    for row, edits in enumerate(of_rows):
        alone = together[:, together[EditField.ROW] == row]
        np.testing.assert_array_equal(alone[1:], joined([edits], [seen[row]], VOCAB)[1:])
        assert len(set(alone[EditField.TOKEN_ID].tolist())) == alone.shape[1]
