from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.batching.prefill_chunks import PrefillChunks
from shortfin_apps.llm.components.batching.token_budget import TokenBudget
from shortfin_apps.llm.components.request.request import Request
from tests.components.batching.modes.mode_inputs import STRIDE, running


def fixed(chunk: int | None = 128, rows: Sequence[int] = (1, 2, 4)) -> PrefillChunks:
    return PrefillChunks(stride=STRIDE, chunk_tokens=chunk, row_buckets=rows)


def budgeted(
    while_decoding: int = 320, idle: int = 512, chunk: int = 128, rows: Sequence[int] = (1, 2, 4)
) -> PrefillChunks:
    budget = TokenBudget(while_decoding=while_decoding, idle=idle, context_span=1024)
    return PrefillChunks(stride=STRIDE, chunk_tokens=chunk, row_buckets=rows, budget=budget)


def spans(tasks: Iterable[LlmTaskInput]) -> list[tuple[int, int]]:
    return [(task.start_position, task.seq_len) for task in tasks]


def run_all(chunks: PrefillChunks, requests: Sequence[Request], num_decodes: int) -> list[list[str]]:
    """The request ids in each invocation until all prompts are computed."""
    seen = []
    while left := [r for r in requests if r.num_unplanned]:
        tasks = chunks.next_tasks(left, num_decodes)
        seen.append([task.request.request_id for task in tasks])
        for task in tasks:
            task.request.num_computed = task.request.num_planned = task.seq_len
    return seen


@pytest.mark.parametrize("chunks", [fixed(), budgeted()])
def test_equal_chunks_run_together(chunks: PrefillChunks) -> None:
    requests = [running("a", 250), running("b", 40), running("c", 300), running("d", 128)]
    assert spans(chunks.next_tasks(requests, num_decodes=0)) == [(0, 128)] * 3


@pytest.mark.parametrize("chunks", [fixed(), budgeted()])
def test_no_more_chunks_run_than_the_largest_entry_has_rows(chunks: PrefillChunks) -> None:
    requests = [running(str(index), 300) for index in range(6)]
    tasks = chunks.next_tasks(requests, num_decodes=0)
    assert [task.request.request_id for task in tasks] == ["0", "1", "2", "3"]


def test_a_single_prompt_takes_as_much_of_the_budget_as_it_has_tokens() -> None:
    request = running("a", 1000)
    assert spans(budgeted().next_tasks([request], num_decodes=0)) == [(0, 512)]
    request.num_computed = request.num_planned = 512
    assert spans(budgeted().next_tasks([request], num_decodes=0)) == [(512, 1000)]
    assert spans(fixed().next_tasks([request], num_decodes=0)) == [(512, 640)]


def test_the_two_requests_of_the_design_document_take_three_invocations() -> None:
    for chunks in (fixed(), budgeted()):
        requests = [running("R1", 250), running("R2", 300)]
        assert run_all(chunks, requests, num_decodes=0) == [["R1", "R2"], ["R1", "R2"], ["R2"]]


def test_padding_rows_count_against_the_budget() -> None:
    """Two rows would run in the bucket of four, so the budget while decoding holds only one prompt."""
    requests = [running("a", 1000), running("b", 1000)]
    assert spans(budgeted(rows=(1, 4)).next_tasks(requests, num_decodes=8)) == [(0, 320)]
    assert spans(budgeted(256).next_tasks(requests, num_decodes=8)) == [(0, 128)] * 2
    assert spans(budgeted(rows=(4,)).next_tasks(requests[:1], num_decodes=8)) == [(0, 80)]


@pytest.mark.parametrize(("rows", "num_prompts", "num_rows"), [((1, 4), 2, 1), ((1, 4), 3, 3), ((4,), 2, 2)])
def test_at_most_a_quarter_of_the_rows_is_padding_unless_the_smallest_entry_runs(
    rows: tuple[int, ...], num_prompts: int, num_rows: int
) -> None:
    requests = [running(str(index), 128) for index in range(num_prompts)]
    tasks = budgeted(rows=rows).next_tasks(requests, num_decodes=0)
    assert spans(tasks) == [(0, 128)] * num_rows


def test_a_prompt_with_more_tokens_than_several_chunks_in_total_runs_alone() -> None:
    requests = [running("a", 1000), running("b", 1000)]
    assert spans(budgeted(320).next_tasks(requests, num_decodes=8)) == [(0, 320)]


def test_while_decoding_a_prompt_that_an_invocation_finishes_is_not_cut_to_share_it() -> None:
    requests = [running("a", 200), running("b", 200)]
    assert spans(budgeted().next_tasks(requests, num_decodes=8)) == [(0, 200)]
    assert spans(budgeted().next_tasks(requests, num_decodes=0)) == [(0, 128)] * 2
    requests = [running("a", 128), running("b", 200)]
    assert spans(budgeted().next_tasks(requests, num_decodes=8)) == [(0, 128)] * 2


@pytest.mark.parametrize(("context", "chunk"), [(0, 320), (512, 208), (1024, 160), (4096, 64), (12_000, 16)])
def test_while_decoding_a_chunk_gets_shorter_as_its_context_grows(context: int, chunk: int) -> None:
    prompt = running("prompt", context + 4096, context)
    (while_decoding,) = budgeted().next_tasks([prompt], num_decodes=8)
    (idle,) = budgeted().next_tasks([prompt], num_decodes=0)
    assert (len(while_decoding.token_ids), len(idle.token_ids)) == (chunk, 512)


def test_prompts_that_one_invocation_finishes_overtake_a_long_one_every_other_time() -> None:
    requests = [running("long", 2000), running("b", 300), running("c", 200), running("d", 310)]
    seen = run_all(budgeted(idle=320), requests, num_decodes=0)
    assert seen[:6] == [["b"], ["long"], ["c"], ["long"], ["d"], ["long"]]
    assert set(map(tuple, seen[6:])) == {("long",)}


def test_equal_short_prompts_overtake_together() -> None:
    requests = [running("long", 2000), *(running(str(index), 60) for index in range(3))]
    assert run_all(budgeted(), requests, num_decodes=8)[0] == ["0", "1", "2"]


def test_a_tuned_budget_cuts_a_short_backlog_beside_decodes_and_a_long_one_less() -> None:
    chunks = budgeted()
    assert chunks.budget is not None
    chunks.budget.least = 96
    assert spans(chunks.next_tasks([running("a", 512)], num_decodes=8)) == [(0, 96)]
    assert spans(chunks.next_tasks([running("a", 512)], num_decodes=0)) == [(0, 512)]
    many = [running(str(index), 1000) for index in range(4)]
    assert spans(chunks.next_tasks(many, num_decodes=8)) == [(0, 320)]


def test_chunks_of_one_size_have_no_budget() -> None:
    assert fixed().budget is None


def test_a_budget_smaller_than_the_chunk_cuts_it() -> None:
    requests = [running("a", 300), running("b", 300)]
    assert spans(budgeted(idle=32).next_tasks(requests, num_decodes=0)) == [(0, 32)]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 18)), min_size=1, max_size=12),
    st.sampled_from([None, (16, 16), (64, 256), (80, 48)]),
    st.sampled_from([(1,), (1, 4), (2, 4), (8,)]),
    st.lists(st.sampled_from([0, 1, 8]), min_size=1, max_size=5),
)
def test_batches_keep_to_the_budget_and_the_rows_and_every_prompt_completes_in_order(
    shapes: list[tuple[int, int]], budget: tuple[int, int] | None, rows: tuple[int, ...], decoding: list[int]
) -> None:
    requests = [running(str(i), n, min(c * 16, (n - 1) // 16 * 16)) for i, (n, c) in enumerate(shapes)]
    chunks = fixed(64, rows) if budget is None else budgeted(*budget, chunk=64, rows=rows)
    oldest_waited = False
    for step in range(1000):
        left = [r for r in requests if r.num_unplanned]
        if not left:
            return
        num_decodes = decoding[step % len(decoding)]
        tasks = chunks.next_tasks(left, num_decodes)
        ids = [task.request.request_id for task in tasks]
        assert len(set(ids)) == len(ids) <= max(rows)
        assert len({pages_of(task) for task in tasks}) == 1
        if budget is not None:
            padded_rows = min(n for n in rows if n >= len(tasks))
            most = budget[0] if num_decodes else budget[1]
            assert pages_of(tasks[0]) == 1 or padded_rows * pages_of(tasks[0]) * STRIDE <= most
        assert not (oldest_waited and left[0].request_id not in ids), "overtaken twice in a row"
        oldest_waited = left[0].request_id not in ids
        for task in tasks:
            assert task.start_position == task.request.num_planned
            assert task.start_position % STRIDE == 0
            task.request.num_computed = task.request.num_planned = task.seq_len
    raise AssertionError("never finished")


def pages_of(task: LlmTaskInput) -> int:
    return -(-len(task.token_ids) // STRIDE)
