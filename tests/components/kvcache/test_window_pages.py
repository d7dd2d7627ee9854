"""Pages of windows: who holds them, when they are given up, and which prefixes are found without them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from shortfin_apps.llm.components.kvcache import (
    SCRATCH_PAGE,
    CacheUsage,
    KVCache,
    Lease,
    WindowOptions,
    make_cache,
)
from tests.components.kvcache.cache_machine import CacheMachine, Sequence
from tests.components.kvcache.mirror import Prefix

STRIDE = 4


class WindowMachine(CacheMachine):
    """The same requests, where the pages of windows are modelled too.

    The model keeps the page of each prefix that has one, each lease's first page that it still holds, and the
    time when each page was released last.
    """

    windows = st.integers(1, 7)
    holds_states = False

    def new_cache(self, num_pages: int, data: st.DataObject) -> KVCache:
        self.window = data.draw(self.windows)
        self.chunk = data.draw(st.none() | st.integers(1, 6))
        self.num_window_pages = data.draw(st.integers(2, 12))
        self.kept: dict[Prefix, int] = {}
        self.first_held: dict[Sequence, int] = {}
        self.columns: dict[Sequence, list[int]] = {}
        self.window_memory: dict[int, list[Prefix | None]] = {}
        self.released: dict[int, int] = {}
        self.window_clock = 0
        window = WindowOptions(
            tokens=self.window, num_pages=self.num_window_pages, holds_states=self.holds_states
        )
        return make_cache(self.name, num_pages, self.stride, window, self.mirror)

    def table(self, sequence: Sequence) -> list[int]:
        assert sequence.lease.window_page_ids is not None
        return sequence.lease.window_page_ids

    def held(self, sequence: Sequence) -> list[int]:
        return self.columns[sequence][self.first_held[sequence] :]

    def leased_windows(self) -> set[int]:
        return {page_id for sequence in self.running for page_id in self.held(sequence)}

    def unleased_windows(self) -> set[int]:
        return set(self.kept.values()) - self.leased_windows()

    def num_free_windows(self) -> int:
        return self.num_window_pages - 1 - len(self.leased_windows() | set(self.kept.values()))

    def seen_pages(self, position: int) -> range:
        """The full pages before a page's first slot, `position`, that its token sees a slot of."""
        return range(max(0, position - self.window + 1) // self.stride, position // self.stride)

    def published_prefix(self, tokens: list[int], salt: str | None) -> int:
        length = super().published_prefix(tokens, salt)
        while any(
            (salt, tuple(tokens[: (page + 1) * self.stride])) not in self.kept
            for page in self.seen_pages(length)
        ):
            length -= self.stride
        return length

    def evict_one(self) -> None:
        before = set(self.published)
        super().evict_one()
        for prefix in before - set(self.published):
            self.kept.pop(prefix, None)

    def evict_one_window(self) -> None:
        oldest = min(self.unleased_windows(), key=lambda page_id: self.released[page_id])
        self.kept = {prefix: page_id for prefix, page_id in self.kept.items() if page_id != oldest}

    def release_windows(self, page_ids: list[int]) -> None:
        """Follows a lease that does not hold these pages any more."""
        for page_id in page_ids:
            self.window_clock += 1
            if page_id not in self.leased_windows():
                self.released[page_id] = self.window_clock

    # Operations of the engine

    def start(self, tokens: list[int], salt: str | None) -> Sequence:
        sequence = super().start(tokens, salt)
        seen = self.seen_pages(sequence.num_computed)
        self.first_held[sequence] = seen.start
        expected = [self.kept[sequence.prefix((page + 1) * self.stride)] for page in seen]
        self.columns[sequence] = [SCRATCH_PAGE] * seen.start + expected
        assert self.table(sequence) == self.columns[sequence]
        return sequence

    def window_tokens(self, sequence: Sequence) -> int | None:
        return None if self.chunk is None else sequence.num_computed + self.chunk

    def window_fits(self, sequence: Sequence, num_tokens: int) -> bool:
        wanted = self.window_tokens(sequence)
        pages = -(-(num_tokens if wanted is None else wanted) // self.stride)
        self.missing_windows = max(0, pages - len(self.table(sequence)))
        return self.missing_windows <= self.num_free_windows() + len(self.unleased_windows())

    def grew(self, sequence: Sequence) -> None:
        while self.num_free_windows() < self.missing_windows:
            self.evict_one_window()
        columns, table = self.columns[sequence], self.table(sequence)
        new = table[len(columns) :]
        assert table[: len(columns)] == columns
        assert len(new) == len(set(new)) == self.missing_windows
        assert not {SCRATCH_PAGE, *self.leased_windows(), *self.kept.values()} & set(new)
        columns += new
        self.window_memory |= {page_id: [None] * self.stride for page_id in new}

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        begin = sequence.num_computed
        super().compute(sequence, num_tokens)
        for position in range(begin, sequence.num_computed):
            index, slot = divmod(position, self.stride)
            page_id = self.table(sequence)[index]
            assert index >= self.first_held[sequence], "a page is written that was given up"
            assert page_id not in self.kept.values(), "a shared page would be written"
            assert sum(page_id in self.held(other) for other in self.running) == 1
            self.window_memory[page_id][slot] = sequence.prefix(position + 1)

    def publish(self, sequence: Sequence, whole: bool) -> None:
        begin = sequence.num_published_pages
        table, first_held = list(self.table(sequence)), self.first_held[sequence]
        super().publish(sequence, whole)
        for index in range(max(begin, first_held), sequence.num_published_pages):
            if self.name == "trie":
                self.kept.setdefault(sequence.prefix((index + 1) * self.stride), table[index])
        self.gave_up(sequence)

    def gave_up(self, sequence: Sequence) -> None:
        first_held = self.first_held[sequence]
        first_seen = max(0, sequence.num_computed - self.window + 1) // self.stride
        self.first_held[sequence] = max(first_held, min(first_seen, len(self.table(sequence))))
        self.release_windows(self.table(sequence)[first_held : self.first_held[sequence]])

    def stop(self, sequence: Sequence) -> None:
        held = self.held(sequence)
        super().stop(sequence)
        self.release_windows(held)
        assert not self.table(sequence)

    # Rules

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.cache.give_up(sequence.lease, sequence.num_computed)
        self.gave_up(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), stops=st.booleans())
    def retract(self, data: st.DataObject, stops: bool) -> None:
        super().retract(data, stops)
        self.kept = {prefix: page_id for prefix, page_id in self.kept.items() if prefix in self.published}

    @rule()
    def flush(self) -> None:
        super().flush()
        for _ in self.unleased_windows():
            self.evict_one_window()

    # Invariants after each rule

    @invariant()
    def every_window_page_has_its_owner(self) -> None:
        free, cached, leased = (
            self.num_free_windows(),
            len(self.unleased_windows()),
            len(self.leased_windows()),
        )
        total = self.num_window_pages - 1
        assert self.cache.window_usage() == CacheUsage(total=total, free=free, cached=cached, leased=leased)
        assert set(self.cache.cached_window_page_ids()) == self.unleased_windows()

    @invariant()
    def every_sequence_sees_its_own_window(self) -> None:
        for sequence in self.running:
            position = sequence.num_computed
            for seen in range(max(0, position - self.window + 1), position):
                index, slot = divmod(seen, self.stride)
                content = self.window_memory[self.table(sequence)[index]][slot]
                assert content == sequence.prefix(seen + 1)


class StateMachine(WindowMachine):
    """The pages hold states: a proposed token has one outside of the table until it is accepted.

    The state after a token is modelled as what the token's slot holds.
    """

    windows = st.just(2)
    holds_states = True

    def new_cache(self, num_pages: int, data: st.DataObject) -> KVCache:
        self.proposed: dict[Sequence, list[int]] = {}
        return super().new_cache(num_pages, data)

    def held(self, sequence: Sequence) -> list[int]:
        return super().held(sequence) + self.proposed.get(sequence, [])

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        num_kept=st.integers(0, 3),
        stops=st.booleans(),
    )
    def propose(self, data: st.DataObject, tokens: list[int], num_kept: int, stops: bool) -> None:
        """Computes all tokens and some proposed ones, of which some are accepted; then perhaps finishes."""
        sequence = self.some(data)
        lease, length = sequence.lease, len(sequence.tokens)
        if not length or not self.grow(sequence, length + len(tokens)):
            return
        room = min(len(tokens), lease.num_pages * self.stride - length)
        available = self.num_free_windows() + len(self.unleased_windows())
        count = max(0, min(room, available - num_kept))
        if room < 1:
            return
        self.compute(sequence, length)
        assert self.cache.reserve_proposed(lease, room, num_kept) == count
        while self.num_free_windows() < count:
            self.evict_one_window()
        new = list(lease.proposed_page_ids)
        assert len(new) == len(set(new)) == count
        assert not {SCRATCH_PAGE, *self.leased_windows(), *self.kept.values()} & set(new)
        self.proposed[sequence] = list(new)
        self.cache.hold([lease, lease])
        for page_id, token in list(zip(new, tokens, strict=False))[: data.draw(st.integers(0, count))]:
            self.accept(sequence, page_id, token)
        if stops:
            self.cache.release(lease)
            self.cache.let_go([lease])
            assert len(lease.proposed_page_ids) == count, "an invocation in flight writes them"
        self.cache.let_go([lease, lease][stops:])
        dropped = self.proposed.pop(sequence)
        self.release_windows(dropped)
        assert not lease.proposed_page_ids
        if stops:
            self.stop(sequence)

    def accept(self, sequence: Sequence, page_id: int, token: int) -> None:
        index, slot = divmod(sequence.num_computed, self.stride)
        sequence.tokens.append(token)
        before, replaced = self.table(sequence), self.columns[sequence][index]
        self.cache.accept(sequence.lease, sequence.num_computed, page_id)
        assert not before, "a block table may still have the row of the list"
        self.columns[sequence][index] = page_id
        self.proposed[sequence].remove(page_id)
        self.proposed[sequence].append(replaced)
        assert self.table(sequence) == self.columns[sequence]
        sequence.num_computed += 1
        self.memory[sequence.lease.page_ids[index]][slot] = sequence.prefix(sequence.num_computed)
        self.window_memory[page_id] = [None] * self.stride
        self.window_memory[page_id][slot] = sequence.prefix(sequence.num_computed)
        if slot == self.stride - 1:
            self.publish(sequence, whole=False)


class BaseStateMachine(StateMachine):
    name = "none"


class TrieStateMachine(StateMachine):
    name = "trie"


class BaseWindowMachine(WindowMachine):
    name = "none"


class TrieWindowMachine(WindowMachine):
    name = "trie"


TestBaseWindows = BaseWindowMachine.TestCase
TestBaseWindows.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestTrieWindows = TrieWindowMachine.TestCase
TestTrieWindows.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBaseStates = BaseStateMachine.TestCase
TestBaseStates.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTrieStates = TrieStateMachine.TestCase
TestTrieStates.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def trie(num_window_pages: int) -> KVCache:
    """A token sees the four before it: those of one full page, or of parts of two."""
    return make_cache("trie", 20, STRIDE, WindowOptions(tokens=5, num_pages=1 + num_window_pages))


def tables(lease: Lease) -> list[int]:
    assert lease.window_page_ids is not None
    return lease.window_page_ids


def test_a_lease_begins_with_the_pages_that_its_first_token_sees() -> None:
    cache, tokens = trie(8), list(range(13))
    first = cache.acquire(tokens)
    assert cache.reserve(first, 13)
    kept = list(tables(first))
    cache.publish(first, tokens, 12)
    assert first.num_given_up == 2, "the token at 12 sees 8 to 11"
    second = cache.acquire(tokens)
    assert second.num_cached_tokens == 12
    assert tables(second) == [SCRATCH_PAGE, SCRATCH_PAGE, kept[2]]
    assert cache.window_usage() == CacheUsage(total=8, free=4, cached=2, leased=2)


def test_a_window_page_is_evicted_without_its_node_and_shortens_what_is_found() -> None:
    cache, tokens = trie(4), list(range(13))
    first = cache.acquire(tokens)
    assert cache.reserve(first, 13)
    cache.publish(first, tokens, 12)
    cache.release(first)
    other = cache.acquire([99] * 9)
    found = [cache.match_length(tokens)]
    for num_tokens in (4, 8, 12, 16):  # the page that is free, and then those released longest ago
        assert cache.reserve(other, num_tokens)
        found.append(cache.match_length(tokens))
    assert found == [12, 12, 12, 12, 0]
    assert cache.usage().cached == 3, "the nodes are still there"
    assert not cache.reserve(other, 20)


def test_pages_that_a_suspect_lease_gives_up_are_suspect() -> None:
    cache = make_cache("none", 20, STRIDE, WindowOptions(tokens=5, num_pages=9))
    lease = cache.acquire([])
    assert cache.reserve(lease, 16)
    before = list(tables(lease))
    cache.give_up(lease, 8)
    lease.is_suspect = True
    cache.give_up(lease, 12)
    assert cache.window_suspects == {before[1]}
    cache.release(lease)
    assert cache.window_suspects == set(before[1:])
    assert cache.has_suspects


def test_windows_of_keys_and_values_need_no_pages_for_proposed_tokens() -> None:
    cache = trie(4)
    lease = cache.acquire([])
    assert cache.reserve(lease, 16)
    assert cache.reserve_proposed(lease, 8, num_kept=3) == 8
    assert not lease.proposed_page_ids
