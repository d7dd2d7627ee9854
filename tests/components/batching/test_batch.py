"""Decodes of several known tokens of a request: one task for each token, in order, within the budget."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput, decode_tasks
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.config import ModelConfig
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES, STRIDE, Entries, running
from tests.components.engine_fixture import call
from tests.components.fake_device import fake_config

BUDGET = 64


def with_known(name: str, length: int, num_known: int) -> Request:
    """A request with `num_known` tokens after its first `length`, which are computed but for the last one."""
    request = running(name, length, computed=length - 1)
    request.token_ids += [2] * num_known
    return request


CONFIG = fake_config(stride=STRIDE, decode=(1, 4, 8))
WITH_STATES = fake_config(stride=STRIDE, decode=(1, 4, 8), states=True)


def next_batch(
    mode: BatchModeName,
    requests: list[Request],
    entries: Entries = ALL_ENTRIES,
    config: ModelConfig = CONFIG,
) -> Batch:
    settings = BatchSettings(batch_mode=mode, token_budget=BUDGET)
    batch = make_mode(settings, config, entries).next_batch(requests)
    assert batch is not None
    return batch


def decodes_of(batch: Batch) -> dict[Request, list[LlmTaskInput]]:
    tasks: dict[Request, list[LlmTaskInput]] = defaultdict(list)
    for task in batch.tasks:
        if task.request.decodes:
            tasks[task.request].append(task)
    return tasks


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@given(
    known=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 33)), min_size=1, max_size=8),
    prompts=st.lists(st.integers(2, 200), max_size=3),
)
def test_each_known_token_is_a_task(
    mode: BatchModeName, known: list[tuple[int, int]], prompts: list[int]
) -> None:
    decodes = [with_known(str(i), length, count) for i, (length, count) in enumerate(known)]
    batch = next_batch(mode, [*decodes, *(running(f"p{i}", length) for i, length in enumerate(prompts))])
    tasks = decodes_of(batch)
    if batch.family is EntryFamily.PREFILL:
        assert not tasks
        return
    num_rows = sum(map(len, tasks.values()))
    room = BUDGET - STRIDE * (mode == "extend-attention" and bool(prompts))
    assert num_rows == min(room, sum(count + 1 for _, count in known))
    assert [request for request, _ in groupby(task.request for task in batch.tasks)] == list(
        dict.fromkeys(task.request for task in batch.tasks)
    ), "tasks of one request are apart"
    for request in decodes:
        assert [task.start_position for task in tasks[request]] == list(
            range(request.num_planned, request.num_planned + len(tasks[request]))
        )
        for task in tasks[request]:
            assert task.token_ids == [request.token_ids[task.start_position]]
            assert task.completes is (task.seq_len == len(request.token_ids))
    if mode == "extend-attention" and prompts:
        assert len(batch.tasks) > num_rows, "the oldest prompt gets a page"
        assert sum(len(task.token_ids) for task in batch.tasks) <= BUDGET
    if mode == "default":
        assert (batch.family is EntryFamily.EXTEND) is (num_rows > len(decodes))


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("lacks", ["packed rows", "states of rows"])
def test_a_request_has_one_task_where_rows_cannot_share_an_invocation(
    mode: BatchModeName, lacks: str
) -> None:
    is_packed = lacks != "packed rows"
    requests = [with_known("a", 20, 5), with_known("b", 33, 0)]
    batch = next_batch(
        mode, requests, Entries(has_packed_extend=is_packed, takes_followers=False), WITH_STATES
    )
    assert [(task.request, task.completes) for task in batch.tasks] == [
        (requests[0], False),
        (requests[1], True),
    ]


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_request_with_a_state_has_a_task_for_each_known_token(mode: BatchModeName) -> None:
    requests = [with_known("a", 20, 5), with_known("b", 33, 0), with_known("c", 7, 2)]
    batch = next_batch(mode, requests, ALL_ENTRIES, WITH_STATES)
    assert [task.request for task in batch.tasks] == [requests[0]] * 6 + [requests[1]] + [requests[2]] * 3


def test_known_tokens_are_no_chunk_even_from_the_start_of_a_page_on() -> None:
    request = with_known("a", STRIDE + 1, 3)
    assert request.num_planned % STRIDE == 0
    for mode in ("default", "extend-attention"):
        batch = next_batch(mode, [request])
        assert [len(task.token_ids) for task in batch.tasks] == [1] * 4


def test_known_tokens_are_a_prompt_again_after_a_preemption() -> None:
    cache = make_cache("none", 64, STRIDE)
    request = Request(call("a", [1] * 20, max_tokens=30))
    for num_tokens in (20, 40):
        lease = cache.acquire(request.token_ids)
        assert cache.reserve(lease, 41)
        request.start(lease)
        for request.num_planned in range(0, num_tokens, STRIDE):
            assert not request.decodes
            batch = next_batch("extend-attention", [request])
            assert [task.seq_len for task in batch.tasks] == [num_tokens]
        request.num_planned = num_tokens
        request.token_ids += [2] * 20
        assert request.decodes
        request.preempt(cache)


def test_every_request_has_a_row_before_one_has_two() -> None:
    requests = [with_known(name, 9, 4) for name in "abc"]
    assert [task.request for task in decode_tasks(requests, 5)] == [requests[0]] * 3 + requests[1:]
