from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.simulate_cluster.prefix_store import CONVERSATION, GROUP, Key, PrefixStore

PREFIX = 10
# (conversation, tokens): of conversation c the group is c modulo 3.
PUTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=60)


@given(PUTS, st.integers(20, 120))
def test_what_was_used_last_is_held_as_a_list_of_all_uses_says(
    puts: list[tuple[int, int]], capacity: int
) -> None:
    """The reference walks the uses from the last one back, as far as the capacity goes."""
    dropped: list[Key] = []
    store = PrefixStore(capacity, dropped.append)
    uses: list[tuple[Key, int]] = []
    for conversation, tokens in puts:
        group = conversation % 3
        store.put(group, PREFIX, conversation, tokens)
        for key, size in (((CONVERSATION, conversation), tokens), ((GROUP, group), PREFIX)):
            uses = [use for use in uses if use[0] != key] + [(key, size)]
        while sum(size for _, size in uses) > capacity:
            assert uses.pop(0)[0] in dropped
        held = dict(uses)
        assert store.size == sum(held.values())
        for c in range(9):
            assert store.held(c % 3, c) == (
                PREFIX + held.get((CONVERSATION, c), 0) if (GROUP, c % 3) in held else 0
            )


def test_pinned_prefixes_stay_and_are_counted_once() -> None:
    store = PrefixStore(100)
    store.put(0, 40, 0, 20, pin=True)
    store.put(0, 40, 1, 20, pin=True)
    assert store.pinned_tokens == 40 + 20 + 20
    store.put(1, 40, 2, 50)
    assert store.held(0, 0) == store.held(0, 1) == 60
    store.unpin(0, 0)
    assert store.pinned_tokens == 60
    store.unpin(0, 1)
    assert store.pinned_tokens == 0
    assert store.size <= 100
    store.put(1, 40, 2, 60)
    assert store.held(1, 2) == 100
    assert store.held(0, 0) == 0


def test_what_is_larger_than_the_memory_is_held_while_it_is_pinned() -> None:
    store = PrefixStore(10)
    store.put(0, 40, 0, 20, pin=True)
    assert store.held(0, 0) == 60
    store.unpin(0, 0)
    assert store.held(0, 0) == store.size == 0
