from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.row_draws import (
    LEAST_EDITS,
    Array,
    DrawArguments,
    LastUpload,
    padded_draws,
    padded_edits,
    padded_logprobs,
)
from shortfin_apps.llm.components.invocation.slot_tables import SlotTables
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request, TokenCounts
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.contract.abi import KEPT, EditField, Layout, PenaltyField
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeBuffer, FakeDevice, FakeProgram, fake_config


def test_padding_is_of_row_0_at_position_minus_1() -> None:
    requests = [Request(call(name, [1])) for name in "abcd"]
    requests[3].slot, requests[1].slot = 9, 5
    tasks = [LlmTaskInput(request, [1], 4 * row, 4 * row + 1, []) for row, request in enumerate(requests)]
    fields = {requests[3]: array("q", [1, 2, 3, 4, 5, 6]), requests[1]: array("q", [7] * 6)}
    padded = padded_draws(3, tasks, [3, 1], fields.__getitem__)
    assert padded["row_indices"].tolist() == [3, 1, 0]
    assert padded["positions"].tolist() == [12, 4, -1]
    assert padded["slots"].tolist() == [9, 5, -1]
    unstored = padded_draws(3, tasks, [3, 1], fields.__getitem__, slots=())
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


class Adjusting:
    """Draws of two requests with edits, which know how often arguments were uploaded."""

    def __init__(self) -> None:
        program = FakeProgram(fake_config(), adjusted_sample_sizes=(2,), sample_sizes=(2,))
        self.uploads = 0
        self.arguments = DrawArguments(self._upload, SlotTables(FakeDevice(program), program.entries))
        self.requests = [Request(call(name, [1, 2])) for name in "ab"]
        for slot, request in enumerate(self.requests):
            request.start(Lease(), slot)
        self.edits = [RowEdits(), RowEdits()]
        self.edits[0].penalise(PenaltyField.PRESENCE, 0.5)
        self.edits[1].bias([3], [1.5])

    def _upload(self, values: Array) -> FakeBuffer:
        self.uploads += 1
        return FakeBuffer(values)

    def draw(
        self, seq_len: int, edits: list[RowEdits] | None = None, *, stores: bool = True, second: int = 0
    ) -> dict[str, Any]:
        """The arguments, as arrays; the second request's task ends `second` tokens later than the first's."""
        shape = Shape("adjusted_sample_bs2", Layout.ADJUSTED_SAMPLE, 2, 0, 0)
        ends = seq_len, seq_len + second
        tasks = [
            LlmTaskInput(request, [1], end - 1, end, [])
            for request, end in zip(self.requests, ends, strict=True)
        ]
        fields = array("q", [0] * 6)
        edits = self.edits if edits is None else edits
        slots = None if stores else ()
        arrays, buffers = self.arguments.of(shape, tasks, [0, 1], lambda _: fields, edits, slots=slots)
        assert arrays.keys() == buffers.keys()
        return {name: values.tolist() for name, values in arrays.items()}


def test_draws_one_token_later_upload_nothing_and_are_recorded_as_they_are() -> None:
    made = Adjusting()
    assert made.draw(2)["resets"] == [1, 0], "the first draw sets the counts"
    second = made.draw(3)
    uploads = made.uploads
    assert made.draw(4) == second | {"positions": [3, 3]}
    assert made.draw(5) == second | {"positions": [4, 4]}
    assert made.uploads == uploads


@pytest.mark.parametrize("other", ["position", "second position", "edits", "unstored", "forgotten"])
def test_other_draws_upload_their_arguments(other: str) -> None:
    made = Adjusting()
    made.edits[0] = RowEdits()  # without penalties, the table need not have the row's counts
    made.draw(2)
    made.draw(3)
    uploads = made.uploads
    if other == "forgotten":
        made.arguments.forget()
    seq_len, edits = (6 if other == "position" else 4), [RowEdits(), RowEdits()] if other == "edits" else None
    second = 2 if other == "second position" else 0
    drawn = made.draw(seq_len, edits, stores=other != "unstored", second=second)
    assert made.uploads > uploads
    assert drawn["positions"] == [seq_len - 1, seq_len - 1 + second]
    assert drawn["slots"] == ([-1, -1] if other == "unstored" else [0, 1])


def test_draws_under_grammars_upload_their_bitmasks_alone() -> None:
    made = Adjusting()

    def masked(*bitmasks: bytes) -> list[RowEdits]:
        edits = [RowEdits() for _ in bitmasks]
        for of_row, bitmask in zip(edits, bitmasks, strict=True):
            of_row.allow(bitmask)
        return edits

    made.draw(2, masked(b"\x01", b"\x02"))
    uploads = made.uploads
    drawn = made.draw(3, masked(b"\x04", b"\x08"))
    assert made.uploads == uploads + 1
    assert [row[0] for row in drawn["allowed"]] == [4, 8]
    assert drawn["positions"] == [2, 2]
    made.requests[0].lease, made.requests[0].slot = Lease(), 5  # it was preempted, and started again
    assert made.draw(4, masked(b"\x04", b"\x08"))["slots"] == [5, 1]
    uploads = made.uploads
    assert made.draw(6, masked(b"\x04", b"\x08"))["positions"] == [5, 5]
    assert made.uploads == uploads + 2, "the device has advanced the positions by one"


def test_counts_are_passed_again_after_a_failure() -> None:
    made = Adjusting()
    made.draw(2)
    made.requests[0].token_ids.append(7)
    made.arguments.forget()
    drawn = made.draw(3)
    assert drawn["resets"] == [1, 0]
    assert drawn["edits"][EditField.TOKEN_ID][:2] == [7, 3], "the prompt's tokens change nothing"
