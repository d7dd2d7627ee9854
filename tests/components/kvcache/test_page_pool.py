from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE
from shortfin_apps.llm.components.kvcache.page_pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool against a multiset of the references handed out."""

    @initialize(num_pages=st.integers(2, 8))
    def make(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        room = self.pool.total - len(self.held)
        page_ids = self.pool.allocate(count)
        assert (page_ids is not None) == (count <= room)
        for page_id in page_ids or []:
            assert page_id not in self.held
            self.held[page_id] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page_id = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.retain(page_id)
        self.held[page_id] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page_id = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(page_id)
        self.held -= Counter([page_id])

    @rule(page_id=st.integers(0, 7))
    def refuses_to_touch_what_is_free(self, page_id: int) -> None:
        if page_id < self.pool.num_pages and page_id not in self.held:
            with pytest.raises(AssertionError):
                self.pool.release(page_id)
            with pytest.raises(AssertionError):
                self.pool.retain(page_id)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.total - len(self.held)
        assert all(self.pool.references(page_id) == count for page_id, count in self.held.items())
        assert SCRATCH_PAGE not in self.held


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_every_page_but_the_scratch_page_is_allocated() -> None:
    assert sorted(PagePool(5).allocate(4) or []) == [1, 2, 3, 4]


def test_an_allocation_that_fails_returns_none_and_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_table_of_only_the_scratch_page_is_refused() -> None:
    with pytest.raises(ValueError, match="scratch page"):
        PagePool(1)


def _free_twice(pool: PagePool) -> None:
    pool._free.append(pool._free[0])


def _free_the_scratch_page(pool: PagePool) -> None:
    pool._free.append(SCRATCH_PAGE)


def _own_the_scratch_page(pool: PagePool) -> None:
    pool._references[SCRATCH_PAGE] = 1


def _lose(pool: PagePool) -> None:
    pool._free.pop()


def _own_a_free_page(pool: PagePool) -> None:
    pool._references[pool._free[0]] = 1


@pytest.mark.parametrize(
    "damage", [_free_twice, _free_the_scratch_page, _own_the_scratch_page, _lose, _own_a_free_page]
)
def test_check_integrity_detects(damage: Callable[[PagePool], None]) -> None:
    pool = PagePool(4)
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()
