from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.self_test.last_tokens import Table, packed_arguments
from shortfin_apps.llm.contract.abi import NOT_SEEN
from tests.components.engine_fixture import call

TOKENS = st.integers(0, 999)


@given(st.lists(TOKENS, min_size=1, max_size=9), st.data())
def test_a_table_has_what_was_drawn_and_else_what_it_had(token_ids: list[int], data: st.DataObject) -> None:
    table = Table(token_ids)
    assert table.array[table.slots].tolist() == token_ids
    drawn = np.array([data.draw(TOKENS | st.just(-1)) for _ in token_ids])
    after = table.array
    for slot, token_id in zip(table.slots, drawn, strict=True):
        after[slot] = token_id if token_id >= 0 else after[slot]
    assert table.problem(after, drawn) is None
    after[data.draw(st.integers(0, len(token_ids)))] += 1
    assert table.problem(after, drawn) is not None


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=4), st.data())
def test_counts_are_of_the_tokens_that_rows_drew(drawn: list[int], data: st.DataObject) -> None:
    table = Table([0] * len(drawn))
    after = table.counts(vocab_size=9)
    for slot, token_id in zip(table.slots, drawn, strict=True):
        after[slot] = NOT_SEEN
        if token_id >= 0:
            after[slot, token_id] = 1
    assert table.counts_problem(after, np.array(drawn)) is None
    after[data.draw(st.integers(0, len(drawn))), data.draw(st.integers(0, 8))] += 1
    assert table.counts_problem(after, np.array(drawn)) is not None


def test_the_first_tasks_followers_continue_it() -> None:
    request = Request(call("a", [1]))
    tasks = [LlmTaskInput(request, [at], at, at + 1, [1]) for at in range(3, 6)]
    tasks.append(LlmTaskInput(request, [7, 8], 0, 2, [2]))
    for num_followers, expected in ((0, [0] * 4), (2, [2, -1, -1, 0])):
        assert packed_arguments(tasks, 8, num_followers)["followers"].tolist() == expected
