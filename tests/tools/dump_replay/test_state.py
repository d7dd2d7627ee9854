"""A dump from anybody must not make a device read or write where nothing is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.records import Array, Draw, Logprobs, Task
from shortfin_apps.llm.contract.abi import KEPT, EditField, PenaltyField, SamplingField
from shortfin_apps.llm.tools.dump_replay.state import (
    Held,
    KnownPages,
    check_tokens,
    draw_arguments,
    lacks_counts,
    logprob_arguments,
    with_counts,
    without_slots,
)
from tests.components.fake_device import VOCAB, FakeBuffer

RESULTS = {"logits": FakeBuffer(np.zeros((2, 1, VOCAB), np.float32))}


def array(values: np.ndarray, dtype: str) -> Array:
    values = values.astype(dtype)
    return Array(dtype, values.shape, values.tobytes())


def draw(**other: Array) -> Draw:
    edits = np.zeros((len(EditField), 3))
    arguments = {
        "row_indices": array(np.array([0, 1]), "<i8"),
        "slots": array(np.array([7, -1]), "<i8"),
        "positions": array(np.array([4, 5]), "<i8"),
        "sampling": array(np.zeros((len(SamplingField), 2)), "<i8"),
        "penalties": array(np.zeros((len(PenaltyField), 2)), "<f4"),
        "edits": array(edits, "<i4"),
        "allowed": array(np.zeros((1, 1)), "<i4"),
        "allowed_indices": array(np.array([0, -1]), "<i8"),
        "resets": array(np.array([0, 1]), "<i8"),
    }
    return Draw(number=1, began_s=0.0, entry="adjusted_sample_bs2", arguments=arguments | other, num_draws=2)


def test_arguments_are_as_they_were() -> None:
    found = draw_arguments(draw(), RESULTS)
    assert found["positions"].tolist() == [4, 5]
    assert found["slots"].tolist() == [7, -1]
    assert found["edits"].shape == (len(EditField), 3)
    assert without_slots(found)["slots"].tolist() == [-1, -1]


def test_counts_that_only_the_servers_table_had_are_added_to_the_edits() -> None:
    edits = np.array([[0, 0, 1, -1], [5, 6, 5, 0], [11, 12, 13, 0], [KEPT, KEPT, KEPT, 0]])
    penalties, slots = np.ones((len(PenaltyField), 2)), np.array([7, 8])
    arrays = draw_arguments(
        draw(edits=array(edits, "<i4"), penalties=array(penalties, "<f4"), slots=array(slots, "<i8")), RESULTS
    )
    assert [lacks_counts(arrays, row) for row in range(2)] == [True, False]
    sampling = np.zeros((len(SamplingField), 2), np.int64)
    sampling[SamplingField.PROMPT_LENGTH] = 2
    found = with_counts(arrays | {"sampling": sampling}, 0, [4, 5, 5, 9, VOCAB], VOCAB)["edits"]
    own = found[1:, found[EditField.ROW] == 0].T.tolist()
    assert sorted(own) == [[4, 0, 0], [5, 11, 1], [6, 12, KEPT], [9, 0, 1]]
    np.testing.assert_array_equal(found[:, found[EditField.ROW] != 0], edits[:, 2:])


def test_rows_without_penalties_or_with_counts_in_their_edits_lack_none() -> None:
    plain = array(np.array([[1, 1], [0, 0], [0, 0]]), "<f4")
    slots = array(np.array([7, 8]), "<i8")
    assert not any(
        lacks_counts(draw_arguments(draw(penalties=plain, slots=slots), RESULTS), r) for r in (0, 1)
    )
    assert not lacks_counts(draw_arguments(draw(slots=array(np.array([-1, 8]), "<i8")), RESULTS), 0)


def logprobs(num_rows: int = 2, **other: Array) -> Logprobs:
    arguments = {name: draw().arguments[name] for name in ("row_indices", "slots")}
    entry = "logprobs_bs2"
    return Logprobs(number=1, began_s=0.0, entry=entry, arguments=arguments | other, num_rows=num_rows)


def test_arguments_of_logprobs_have_no_tokens() -> None:
    found = logprob_arguments(logprobs(), RESULTS)
    assert found["row_indices"].tolist() == [0, 1]
    assert found["slots"].tolist() == [-1, -1]


@pytest.mark.parametrize(
    "record",
    [
        logprobs(num_rows=3),
        logprobs(row_indices=array(np.array([0, 2]), "<i8")),
        logprobs(row_indices=array(np.array([-1, 0]), "<i8")),
        logprobs(slots=array(np.array([0]), "<i8")),
        logprobs(positions=array(np.array([4, 5]), "<i8")),
    ],
)
def test_logprobs_of_rows_that_are_not_there_are_refused(record: Logprobs) -> None:
    with pytest.raises(DumpError):
        logprob_arguments(record, RESULTS)


@pytest.mark.parametrize(
    "other",
    [
        {"row_indices": array(np.array([0, 2]), "<i8")},
        {"row_indices": array(np.array([-1, 0]), "<i8")},
        {"row_indices": array(np.array([0]), "<i8")},
        {"slots": array(np.array([0]), "<i8")},
        {"sampling": array(np.zeros((len(SamplingField), 9)), "<i8")},
        {"edits": array(np.full((len(EditField), 1), VOCAB), "<i4")},
        {"edits": array(np.zeros((2, 1)), "<i4")},
        {"allowed": array(np.zeros((1, 7)), "<i4")},
        {"allowed_indices": array(np.array([5, 0]), "<i8")},
        {"resets": array(np.array([0]), "<i8")},
        {"positions": Array("|O", (1,), bytes(8))},
        {"positions": Array("<i8", (9,), bytes(8))},
        {"positions": Array("<i8", (), bytes(8))},
        {"cache": array(np.zeros(1), "<i8")},
    ],
)
def test_arguments_that_point_nowhere_are_refused(other: dict[str, Array]) -> None:
    with pytest.raises(DumpError, match="record 1"):
        draw_arguments(draw(**other), RESULTS)


def test_more_draws_than_rows_are_refused() -> None:
    with pytest.raises(DumpError, match="record 1"):
        draw_arguments(msgspec.structs.replace(draw(), num_draws=3), RESULTS)


def test_tokens_that_the_model_has_not_are_refused() -> None:
    check_tokens(Task(1, 0, (0, 31)), 32)
    check_tokens(Task(1, 0, (99,)), None)
    with pytest.raises(DumpError, match="32"):
        check_tokens(Task(1, 0, (0, 32)), 32)
    with pytest.raises(DumpError, match="-2"):
        check_tokens(Task(1, 0, (0, -2)), None)


TOKENS = [1, 2, 3, 4, 5, 6]


def test_pages_are_known_by_the_tokens_up_to_theirs() -> None:
    pages = KnownPages(stride=4)
    assert pages.held([7, 8], TOKENS, 0) == [(0, Held.UNKNOWN), (1, Held.UNKNOWN)]
    pages.wrote([7, 8], TOKENS, 0, is_known=True)
    assert pages.held([7, 8], TOKENS, 0) == [(0, Held.SAME), (1, Held.SAME)]
    assert pages.held([7, 8], TOKENS[:5], 1) == [(1, Held.SAME)]
    assert pages.held([7, 8], [*TOKENS, 9], 0) == [(0, Held.SAME), (1, Held.OTHER)]
    assert pages.held([7, 8], [9, *TOKENS[1:]], 0) == [(0, Held.OTHER), (1, Held.OTHER)]


def test_a_state_is_of_exactly_its_tokens() -> None:
    pages = KnownPages(stride=4, is_exact=True)
    pages.wrote([7, 8], TOKENS, 0, is_known=True)
    assert pages.held([7, 8], TOKENS, 1) == [(1, Held.SAME)]
    assert pages.held([7, 8], TOKENS[:5], 1) == [(1, Held.OTHER)]


def test_what_was_computed_from_unknown_pages_is_unknown() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], TOKENS[:4], 0, is_known=False)
    assert pages.held([7], TOKENS[:4], 0) == [(0, Held.UNKNOWN)]


def test_a_rejected_token_is_written_over() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], [1, 2, 9], 0, is_known=True)
    pages.wrote([7], [1, 2, 3], 2, is_known=True)
    assert pages.held([7], [1, 2, 3], 0) == [(0, Held.SAME)]


def test_zeroed_pages_are_unknown() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], TOKENS[:4], 0, is_known=True)
    pages.forget([7, 99])
    assert pages.held([7], TOKENS[:4], 0) == [(0, Held.UNKNOWN)]
