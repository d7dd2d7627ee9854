from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.invocation.block_tables import MAX_TABLES, BlockTables
from shortfin_apps.llm.components.invocation.entry_counts import TableCounts
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.invocation.loop_state import Fields
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from tests.components.engine_fixture import call, make_rig
from tests.components.fake_device import FakeBuffer, FakePending, array_of, fake_config


def made_anew(tasks: Sequence[LlmTaskInput], rows: int, blocks: int) -> np.ndarray:
    """The table of a batch, by the definition."""
    table = np.zeros((rows, blocks), np.int64)
    for row, task in enumerate(tasks):
        for block, page_id in enumerate(task.page_ids[:blocks]):
            table[row, block] = page_id
    return table


def tasks_of(*page_lists: list[int]) -> list[LlmTaskInput]:
    request = Request(call("r", [1]))
    return [LlmTaskInput(request, [1], 0, 1, page_ids) for page_ids in page_lists]


class Tables:
    """Tables whose every answer is held against one made anew."""

    def __init__(self) -> None:
        self.num_uploads = 0
        self.tables = BlockTables(self._upload)

    def _upload(self, array: np.ndarray) -> FakeBuffer:
        self.num_uploads += 1
        return FakeBuffer(array.copy())

    def step(self, tasks: Sequence[LlmTaskInput], rows: int, blocks: int) -> TableCounts:
        buffer = self.tables.on_device([task.page_ids for task in tasks], rows, blocks)
        assert array_of(buffer).tolist() == made_anew(tasks, rows, blocks).tolist()
        assert self.tables.counts.uploads == self.num_uploads
        return self.tables.counts


def test_an_unchanged_batch_is_filled_once() -> None:
    tables, tasks = Tables(), tasks_of([1, 2], [3])
    for _ in range(3):
        counts = tables.step(tasks, 4, 2)
    assert counts == TableCounts(rows_joined=2, uploads=1)


def test_tasks_of_one_request_share_a_row() -> None:
    tables, pages = Tables(), [1, 2]
    assert tables.step(tasks_of(pages, pages), 2, 2) == TableCounts(rows_joined=1, uploads=1)
    pages.append(3)
    assert tables.step(tasks_of(pages, pages), 2, 3) == TableCounts(rows_joined=1, rows_grew=1, uploads=2)


def test_only_a_row_with_a_new_page_is_filled() -> None:
    tables, pages = Tables(), ([1, 2], [3, 4])
    tables.step(tasks_of(*pages), 2, 2)
    pages[1].append(5)
    assert tables.step(tasks_of(*pages), 2, 3) == TableCounts(rows_joined=2, rows_grew=1, uploads=2)


def test_tasks_come_and_go_and_change_places_without_filling_the_rows_of_others() -> None:
    tables, (a, b, c) = Tables(), ([1], [2], [3])
    tables.step(tasks_of(a, b), 2, 2)
    assert tables.step(tasks_of(c, b, a), 4, 2) == TableCounts(rows_joined=3, uploads=2)
    a.clear()  # as a lease does that is released
    assert tables.step(tasks_of(b, c), 2, 2) == TableCounts(rows_joined=3, uploads=3)


def test_alternating_batches_keep_their_tables() -> None:
    tables = Tables()
    turns = [tasks_of([4 * turn + 1], [4 * turn + 2]) for turn in range(MAX_TABLES)]
    for _ in range(3):
        for tasks in turns:
            counts = tables.step(tasks, 2, 2)
    assert counts == TableCounts(rows_joined=2 * MAX_TABLES, uploads=MAX_TABLES)


def test_other_pages_of_proposed_tokens_are_in_one_table_alone() -> None:
    tables, pages = Tables(), [1, 2]
    tasks = tasks_of(pages, pages, [3])
    before = tables.step(tasks, 4, 2)
    buffer = tables.tables.on_device([task.page_ids for task in tasks], 4, 2, [(1, 1, 7), (2, 0, 9)])
    assert array_of(buffer).tolist() == [[1, 2], [1, 7], [9, 0], [0, 0]]
    assert tables.step(tasks, 4, 2) == replace(before, uploads=before.uploads + 1)


def test_a_list_that_takes_the_place_of_another_has_its_own_row() -> None:
    """As the table of a lease does when a state is accepted."""
    tables, pages = Tables(), [1, 2, 3]
    for page_id in range(4, 40):
        pages, old = [pages[0], page_id, pages[2]], pages
        old.clear()
        tables.step(tasks_of(pages), 1, 3)
    assert len(tables.tables._pages) <= 16, "rows of emptied lists are used again"


def test_the_number_of_kept_tables_is_bounded() -> None:
    tables = Tables()
    turns = [tasks_of([4 * turn + 1], [4 * turn + 2]) for turn in range(MAX_TABLES + 1)]
    for tasks in (*turns, turns[0]):
        counts = tables.step(tasks, 2, 2)
    assert counts.uploads == MAX_TABLES + 2


def test_rows_of_released_lists_are_used_again() -> None:
    tables = Tables()
    for page in range(200):
        kept, released = [2 * page + 1], [2 * page + 2]
        tables.step(tasks_of(kept, released, []), 3, 2)
        kept.clear()
        released.clear()
    assert len(tables.tables._pages) == len(Tables().tables._pages)


def test_a_failed_upload_is_repeated() -> None:
    def fail(array: np.ndarray) -> DeviceBuffer:
        raise RuntimeError("boom")

    tables, pages = Tables(), [1]
    upload, tables.tables._upload = tables.tables._upload, fail
    with pytest.raises(RuntimeError, match="boom"):
        tables.tables.on_device([pages], 1, 2)
    tables.tables._upload = upload
    tables.step(tasks_of(pages), 1, 2)


class BlockTablesMachine(RuleBasedStateMachine):
    """Leases that are acquired, grow and are released, in batches of any order, rows and width."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.page_lists: list[list[int]] = []
        self.new_page = count(1)

    @rule(length=st.integers(1, 6))
    def acquire(self, length: int) -> None:
        self.page_lists.append([next(self.new_page) for _ in range(length)])

    @precondition(lambda self: self.page_lists)
    @rule(data=st.data(), by=st.integers(1, 3))
    def grow(self, data: st.DataObject, by: int) -> None:
        data.draw(st.sampled_from(self.page_lists)).extend(next(self.new_page) for _ in range(by))

    @precondition(lambda self: self.page_lists)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.page_lists) - 1))
        self.page_lists.pop(index).clear()

    @precondition(lambda self: self.page_lists)
    @rule(data=st.data(), padding=st.integers(0, 3), blocks=st.integers(2, 8), times=st.integers(1, 2))
    def run_batch(self, data: st.DataObject, padding: int, blocks: int, times: int) -> None:
        order = data.draw(st.permutations(self.page_lists))
        members = order[: data.draw(st.integers(1, len(order)))]
        for _ in range(times):
            self.tables.step(tasks_of(*members), len(members) + padding, blocks)

    @invariant()
    def few_tables_are_kept(self) -> None:
        assert len(self.tables.tables._on_device) <= MAX_TABLES


TestBlockTables = BlockTablesMachine.TestCase
TestBlockTables.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=14),
    waves=st.lists(st.integers(0, 12), min_size=14, max_size=14),
    leaves=st.sets(st.integers(0, 13)),
    prefix_cache=st.sampled_from(["none", "trie"]),
    mode=st.sampled_from(["default", "extend-attention"]),
    pages=st.integers(17, 60),
    max_running=st.integers(1, 12),
)
def test_every_invocation_gets_the_same_table_as_one_built_from_scratch(
    lengths: list[tuple[int, int]],
    waves: list[int],
    leaves: set[int],
    prefix_cache: str,
    mode: str,
    pages: int,
    max_running: int,
) -> None:
    """Requests arrive at random steps and some are aborted; pools preempt, and decodes take turns."""
    config = fake_config(pages=pages, decode=(1, 2, 4))
    rig = make_rig(config, prefix_cache=prefix_cache, mode=mode, max_running=max_running)  # type: ignore[arg-type]
    batches: list[Batch] = []
    launch, submit = rig.runner.launch, rig.program.submit

    def watched_launch(
        batch: Batch, fields: Fields | None = None, slots: Sequence[int] | None = None
    ) -> Launch:
        batches.append(batch)
        return launch(batch, fields, slots)

    def watched_submit(entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        shape = rig.runner.buckets.nearest(batches[-1])
        expected = made_anew(batches[-1].tasks, shape.rows, shape.blocks)
        assert array_of(arguments[-2]).tolist() == expected.tolist()
        return submit(entry, arguments)

    rig.runner.launch = watched_launch  # type: ignore[method-assign]
    rig.program.submit = watched_submit  # type: ignore[method-assign]
    for index, (prompt_tokens, max_tokens) in enumerate(lengths):
        rig.engine.add(call(str(index), [index + 1] * prompt_tokens, max_tokens))
        for _ in range(waves[index]):
            rig.step()
        if index in leaves and (delta := rig.engine.abort(str(index))) is not None:
            rig.take([delta])
    rig.run()
    stats = rig.engine.stats()
    assert len(batches) == stats.steps
    assert stats.block_tables.uploads <= stats.steps
