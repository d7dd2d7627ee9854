"""Decode loops on the fake device: their steps in flight, and what is uploaded for them."""

from __future__ import annotations

import numpy as np
import pytest

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.decode_loop import DecodeLoop
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.device_sampling import sampling_fields
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import InvocationError
from tests.components.engine_fixture import call
from tests.components.fake_device import FakeDevice, FakeProgram, fake_config, greedy_continuation

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6]]
ROOM = 16


class Setup:
    """Requests whose prompts, but for the last token, are in the cache, with pages for ROOM tokens."""

    def __init__(self, extend_lengths: tuple[int, ...] = ()) -> None:
        config = fake_config()
        self.program = FakeProgram(config, loop_sizes=(4,), extend_rank=1, extend_lengths=extend_lengths)
        self.device = FakeDevice(self.program)
        slab = self.device.allocate((32, 4), config.paged_kv_cache.dtype)
        self.cache = make_cache("none", 32, 4)
        self.runner = BatchRunner(self.device, self.program, config, page_table=[slab])
        self.requests = [Request(call(str(i), prompt, max_tokens=20)) for i, prompt in enumerate(PROMPTS)]
        for request in self.requests:
            lease = self.cache.acquire(request.token_ids)
            assert self.cache.reserve(lease, ROOM)
            request.start(lease)
            request.num_computed = len(request.token_ids) - 1
            for position, token_id in enumerate(request.token_ids[:-1]):
                slab.array[lease.page_ids[position // 4], position % 4] = token_id

    def start(self) -> DecodeLoop:
        tasks = [LlmTaskInput.next_of(request, 1) for request in self.requests]
        batch = Batch(EntryFamily.DECODE, tuple(tasks))
        loop = self.runner.start_loop(batch, [sampling_fields(request, 4) for request in self.requests])
        assert loop is not None
        return loop


def test_steps_are_queued_before_their_tokens_are_known() -> None:
    setup = Setup()
    loop = setup.start()
    for _ in range(5):
        loop.queue()
    assert loop.num_queued == 5
    got = np.array([loop.wait()[0] for _ in range(5)])
    for row, prompt in enumerate(PROMPTS):
        assert got[:, row].tolist() == greedy_continuation(prompt, 5)
    assert loop.num_queued == 0


def test_only_the_start_and_a_new_page_upload_anything() -> None:
    setup = Setup()
    loop = setup.start()
    loop.queue()
    begun = setup.device.uploads
    for _ in range(3):
        loop.queue()
    assert setup.device.uploads == begun
    lease = setup.requests[0].lease
    assert lease is not None
    assert setup.cache.reserve(lease, ROOM + 1)
    loop.queue()
    assert setup.device.uploads == begun + 1
    assert setup.runner.num_uploads == setup.device.uploads


def test_it_tells_the_page_that_each_step_wrote() -> None:
    setup = Setup()
    loop = setup.start()
    for _ in range(3):
        loop.queue()
    pages = [loop.wait()[1] for _ in range(3)]
    first, second = (request.page_ids for request in setup.requests)
    assert pages == [(first[0], second[1]), (first[0], second[1]), (first[1], second[1])]


def test_it_goes_on_only_from_where_it_is() -> None:
    setup = Setup()
    loop = setup.start()
    assert loop.is_at(setup.requests)
    assert not loop.is_at(setup.requests[:1])
    loop.queue()
    assert not loop.is_at(setup.requests)
    for request in setup.requests:
        request.num_computed += 1
    assert loop.is_at(setup.requests)


def test_abandoning_it_waits_for_steps_that_fail() -> None:
    setup = Setup()

    def fail(entry: str) -> None:
        raise InvocationError("broken")

    loop = setup.start()
    for _ in range(3):
        loop.queue()
    setup.program.faults.before = fail
    with pytest.raises(InvocationError, match="broken"):
        loop.wait()
    assert loop.abandon()[0] == {
        setup.requests[0].page_ids[0],
        *setup.requests[0].page_ids[1:2],
        setup.requests[1].page_ids[1],
    }
    assert loop.num_queued == 0
    assert not setup.program.in_flight


def test_there_is_no_loop_for_more_rows_than_were_compiled() -> None:
    setup = Setup()
    tasks = (LlmTaskInput.next_of(setup.requests[0], 1),) * 5
    assert setup.runner.start_loop(Batch(EntryFamily.DECODE, tasks), [[0] * 6] * 5) is None


@pytest.mark.parametrize(
    ("extend_lengths", "family", "rows_with_loop"),
    [
        ((), EntryFamily.EXTEND, {3, 4}),
        ((4,), EntryFamily.EXTEND, {1, 2, 3, 4}),
        ((2,), EntryFamily.EXTEND, {3, 4}),
        ((), EntryFamily.DECODE, {1, 2, 3, 4}),
    ],
)
def test_an_extend_is_preferred_to_many_padding_rows(
    extend_lengths: tuple[int, ...], family: EntryFamily, rows_with_loop: set[int]
) -> None:
    setup = Setup(extend_lengths)
    task = LlmTaskInput.next_of(setup.requests[0], 1)
    for rows in range(1, 5):
        loop = setup.runner.start_loop(Batch(family, (task,) * rows), [[0] * 6] * rows)
        assert (loop is not None) is (rows in rows_with_loop)
