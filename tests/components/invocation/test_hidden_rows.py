"""Which rows of hidden states an invocation reads and writes."""

from __future__ import annotations

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.hidden_rows import hidden_rows
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT, NO_HIDDEN, hidden_row
from tests.components.engine_fixture import call


def request(slot: int, num_cached: int = 0) -> Request:
    made = Request(call("a", [1, 2, 3], 4))
    made.lease, made.slot = Lease(num_cached_tokens=num_cached), slot
    return made


def task(of: Request, start: int, end: int) -> LlmTaskInput:
    return LlmTaskInput(of, [0] * (end - start), start, end, [])


def test_a_task_reads_the_row_of_the_token_before_it_and_writes_that_of_its_last() -> None:
    one, other = request(0), request(5)
    found = hidden_rows([task(one, 4, 9), task(other, 17, 18)], rows=3)
    assert found["hidden_from"].tolist() == [hidden_row(0, 3), hidden_row(5, 16), NO_HIDDEN]
    assert found["hidden_to"].tolist() == [hidden_row(0, 8), hidden_row(5, 17), NO_HIDDEN]


def test_the_first_task_of_a_lease_reads_none() -> None:
    """At the start, or after pages of a prefix; a request without a slot, as in a self-test, has no rows."""
    tasks = [task(request(0), 0, 3), task(request(1, num_cached=16), 16, 20), task(request(-1), 4, 5)]
    assert hidden_rows(tasks, rows=3)["hidden_from"].tolist() == 3 * [NO_HIDDEN]
    assert hidden_rows(tasks[2:], rows=1)["hidden_to"].tolist() == [NO_HIDDEN]
    assert hidden_row(1, 19) in hidden_rows(tasks, rows=3)["hidden_to"]


def test_rows_of_one_request_follow_each_other_and_share_no_place() -> None:
    one, other, count = request(2), request(3), HIDDEN_PER_SLOT + 3
    tasks = [*(task(one, 5 + each, 6 + each) for each in range(count)), task(other, 8, 9)]
    found = hidden_rows(tasks, rows=count + 1)
    assert found["hidden_from"].tolist() == [hidden_row(2, 4), *[-1] * (count - 1), hidden_row(3, 7)]
    kept = found["hidden_to"].tolist()[:-1]
    assert kept[:3] == 3 * [NO_HIDDEN], "later rows have these places"
    assert kept[3:] == [hidden_row(2, 5 + each) for each in range(3, count)]
    assert len(set(kept[3:])) == HIDDEN_PER_SLOT
