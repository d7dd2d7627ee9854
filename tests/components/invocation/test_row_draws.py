from __future__ import annotations

from array import array

import numpy as np

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.row_draws import (
    LEAST_EDITS,
    LastUpload,
    padded_draws,
    padded_edits,
    padded_logprobs,
)
from shortfin_apps.llm.components.request.request import Request, TokenCounts
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.contract.abi import KEPT, EditField, PenaltyField
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeBuffer


def test_padding_is_of_row_0_at_position_minus_1() -> None:
    requests = [Request(call(name, [1])) for name in "abcd"]
    requests[3].slot, requests[1].slot = 9, 5
    tasks = [LlmTaskInput(request, [1], 4 * row, 4 * row + 1, []) for row, request in enumerate(requests)]
    fields = {requests[3]: array("q", [1, 2, 3, 4, 5, 6]), requests[1]: array("q", [7] * 6)}
    padded = padded_draws(3, tasks, [3, 1], fields.__getitem__)
    assert padded["row_indices"].tolist() == [3, 1, 0]
    assert padded["positions"].tolist() == [12, 4, -1]
    assert padded["slots"].tolist() == [9, 5, -1]
    unstored = padded_draws(3, tasks, [3, 1], fields.__getitem__, stores=False)
    assert unstored["slots"].tolist() == [-1, -1, -1]
    assert padded["sampling"].T.tolist() == [[1, 2, 3, 4, 5, 6], [7] * 6, [0] * 6]


def test_edits_name_the_draw_that_they_are_of() -> None:
    seen = TokenCounts(num_prompt=0)
    seen.catch_up([5, 7, 7])
    penalised, biased = RowEdits(), RowEdits()
    penalised.penalise(PenaltyField.PRESENCE, 0.5)
    biased.bias([3], [1.5])
    padded = padded_edits(4, [penalised, RowEdits(), biased], [seen, None, None], vocab_size=40)
    assert padded["edits"][EditField.ROW, :4].tolist() == [0, 0, 2, -1]
    assert padded["edits"][EditField.TOKEN_ID, :3].tolist() == [5, 7, 3]
    assert padded["edits"][EditField.COUNT, :3].tolist() == [1, 2, KEPT]
    assert padded["edits"][EditField.BIAS, :3].view(np.float32).tolist() == [0.0, 0.0, 1.5]
    assert padded["edits"].shape == (len(EditField), LEAST_EDITS)
    assert padded["penalties"].T.tolist() == [[1.0, 0.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0] * 3]
    assert padded["allowed"].shape == (1, 2)
    assert padded["allowed_indices"].tolist() == [-1] * 4
    assert padded["resets"].tolist() == [1, 0, 0, 0]


def test_bitmasks_are_there_for_the_draws_that_have_one() -> None:
    masked = RowEdits()
    masked.allow(b"\x05\x00\x00\x80\x01")
    padded = padded_edits(3, [RowEdits(), masked], [None] * 2, vocab_size=40)
    assert padded["allowed"].view(np.uint32).tolist() == [[0x80000005, 1]]
    assert padded["allowed_indices"].tolist() == [-1, 0, -1]


def test_many_edits_are_padded_to_a_power_of_two() -> None:
    edits = RowEdits()
    edits.ban(range(300))
    assert padded_edits(2, [edits, edits], [None] * 2, vocab_size=512)["edits"].shape[1] == 1024
    assert padded_edits(2, [edits, edits], [None] * 2, vocab_size=100)["edits"].shape[1] == LEAST_EDITS


def test_padding_rows_of_logprobs_have_no_slot() -> None:
    padded = padded_logprobs(4, {3: 0, 1: 7})
    assert padded["row_indices"].tolist() == [3, 1, 0, 0]
    assert padded["slots"].tolist() == [0, 7, -1, -1]


def test_arrays_are_uploaded_again_if_any_has_changed() -> None:
    last = LastUpload(FakeBuffer)
    first = last.on_device(padded_logprobs(4, {3: 0, 1: 7}))
    assert last.on_device(padded_logprobs(4, {3: 0, 1: 7})) is first
    for other in (padded_logprobs(4, {3: 0, 1: 6}), padded_logprobs(4, {3: 0, 2: 7}), padded_logprobs(2, {})):
        uploaded = last.on_device(other)
        for name, values in other.items():
            buffer = uploaded[name]
            assert isinstance(buffer, FakeBuffer)
            np.testing.assert_array_equal(buffer.array, values)
