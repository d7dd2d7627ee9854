from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.buckets import Shape
from shortfin_apps.llm.components.invocation.loop_state import LoopState, padded, padded_sampling
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily, Layout, SamplingField
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeBuffer, array_of

ROWS = 4
SHAPE = Shape("decode_loop_bs4", Layout.LOOP, ROWS, ROWS, 1)


class Loop:
    """A device that advances positions in place; it checks the arguments of each launch against new ones."""

    def __init__(self) -> None:
        self.requests = [Request(call(name, [1] * 5)) for name in "abc"]
        for slot, request in enumerate(self.requests):
            request.slot, request.in_slot = slot, (-1 - slot,)
        self.num_uploads = 0
        self.state = LoopState(self._upload)
        self.batch = self.new_batch(self.requests)

    def _upload(self, values: np.ndarray) -> FakeBuffer:
        self.num_uploads += 1
        return FakeBuffer(values.copy())

    def fields(self, request: Request) -> array[int]:
        return array("q", range(request.slot, request.slot + len(SamplingField)))

    def new_batch(self, requests: list[Request], start: int = 4) -> Batch:
        tasks = [
            LlmTaskInput(r, r.token_ids[start : start + 1] or r.in_slot, start, start + 1, [])
            for r in requests
        ]
        return Batch(EntryFamily.DECODE, tuple(tasks))

    def launch(self, *, fails: bool = False) -> None:
        kept = self.state.following(self.batch)
        if kept is None:
            named = self.state.on_device(self.batch.tasks, ROWS, self.fields)
            kept = SHAPE, [named[name] for name in ("tokens", "slots", "positions", "sampling")]
            self.state.keep(self.batch, kept)
        tokens, slots, positions, sampling = map(array_of, kept[1])
        tasks = self.batch.tasks
        assert tokens.tolist() == padded([task.token_ids[0] for task in tasks], ROWS, 0).tolist()
        assert slots.tolist() == padded([task.request.slot for task in tasks], ROWS, -1).tolist()
        assert positions.tolist() == padded([task.start_position for task in tasks], ROWS, -1).tolist()
        expected = padded_sampling([self.fields(task.request) for task in tasks], ROWS)
        np.testing.assert_array_equal(sampling, expected)
        if fails:
            self.state.forget()
        else:
            positions[positions >= 0] += 1


OPERATIONS = ["follow", "follow", "follow", "commit", "plan anew", "drop one", "move", "skip", "fail"]


@given(st.lists(st.sampled_from(OPERATIONS), max_size=30))
def test_the_arguments_are_those_that_would_be_made_anew(operations: list[str]) -> None:
    loop = Loop()
    loop.launch()
    for operation in operations:
        requests, start = [task.request for task in loop.batch.tasks], loop.batch.tasks[0].seq_len
        if operation == "commit":  # then the host knows the next tokens
            for request in loop.requests:
                request.token_ids += [7] * (start + 1 - len(request.token_ids))
        if operation in ("follow", "commit", "fail"):
            loop.batch = loop.batch.following()
        elif operation == "plan anew":
            loop.batch = loop.new_batch(requests, start)
        elif operation == "drop one":
            loop.batch = loop.new_batch(requests[1:] or loop.requests, start)
        elif operation == "move":  # a request gets another slot when it starts again
            requests[0].slot, requests[0].in_slot = requests[0].slot + 3, (-4 - requests[0].slot,)
            loop.batch = loop.new_batch(requests, start)
        else:
            loop.batch = loop.batch.following().following()  # another entry computed the step between
        loop.launch(fails=operation == "fail")


def test_a_step_uploads_nothing_once_all_tokens_are_on_the_device() -> None:
    loop = Loop()
    loop.launch()
    loop.batch = loop.batch.following()
    loop.launch()
    num_uploads = loop.num_uploads
    for _ in range(5):
        loop.batch = loop.batch.following()
        loop.launch()
    loop.batch = loop.new_batch(loop.requests, loop.batch.tasks[0].seq_len)
    loop.launch()
    assert loop.num_uploads == num_uploads
    assert loop.state.index == 7
