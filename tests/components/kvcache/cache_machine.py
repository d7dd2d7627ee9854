"""A brute-force model of the device's memory, which KV caches are tested against.

The model knows the K/V in each slot of each page: the salt and the tokens it was computed from. It also
keeps the set of published prefixes and the time of their last release, so that it predicts every match and
eviction. A mirror that applies the cache's events has the same set, unless it lacked room for the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shortfin_apps.llm.components.kvcache import (
    SCRATCH_PAGE,
    CacheUsage,
    KVCache,
    Lease,
    PrefixCache,
    make_cache,
)
from tests.components.kvcache.mirror import Mirror, Prefix

TOKENS = st.lists(st.integers(0, 1), max_size=9)
SALTS = st.sampled_from([None, None, None, "", "a"])


@dataclass(eq=False)
class Sequence:
    """A request in the engine."""

    lease: Lease
    salt: str | None
    tokens: list[int]
    num_computed: int
    num_published_pages: int
    is_retracted: bool = False

    def prefix(self, num_tokens: int) -> Prefix:
        return self.salt, tuple(self.tokens[:num_tokens])


class CacheMachine(RuleBasedStateMachine):
    """Requests start, are computed in parts, publish, grow, are preempted and finish, in any order."""

    name: PrefixCache

    @initialize(num_pages=st.integers(6, 16), stride=st.integers(1, 3), data=st.data())
    def make(self, num_pages: int, stride: int, data: st.DataObject) -> None:
        self.stride = stride
        self.mirror, self.is_mirror_behind = Mirror(), False
        self.last_published: set[Prefix] = set()
        self.num_told = 0
        self.cache: KVCache = self.new_cache(num_pages, data)
        self.total = num_pages - 1
        self.running: list[Sequence] = []
        self.memory: dict[int, list[Prefix | None]] = {}
        self.published: dict[Prefix, int] = {}  # and the time of its last release
        self.clock = 0
        self.history: list[tuple[list[int], str | None]] = [([], None)]

    def new_cache(self, num_pages: int, data: st.DataObject) -> KVCache:
        return make_cache(self.name, num_pages, self.stride, listener=self.mirror)

    # The model

    def published_prefix(self, tokens: list[int], salt: str | None) -> int:
        """Tokens of the longest published prefix that a new request may find."""
        length = 0
        while length + self.stride < len(tokens):
            if (salt, tuple(tokens[: length + self.stride])) not in self.published:
                break
            length += self.stride
        return length

    def own_prefixes(self, sequence: Sequence) -> list[Prefix]:
        pages = range(1, (0 if sequence.is_retracted else sequence.num_published_pages) + 1)
        return [sequence.prefix(page * self.stride) for page in pages]

    def unleased(self) -> set[Prefix]:
        leased = {prefix for sequence in self.running for prefix in self.own_prefixes(sequence)}
        return set(self.published) - leased

    def tables(self) -> set[int]:
        return {page_id for sequence in self.running for page_id in sequence.lease.page_ids}

    def num_free(self) -> int:
        return self.total - len(self.tables()) - len(self.unleased())

    def evict_one(self) -> None:
        parents = {(salt, tokens[: -self.stride]) for salt, tokens in self.published}
        leaves = self.unleased() - parents
        del self.published[min(leaves, key=lambda prefix: self.published[prefix])]

    # Operations of the engine

    def start(self, tokens: list[int], salt: str | None) -> Sequence:
        expected = self.published_prefix(tokens, salt)
        assert self.cache.match_length(tokens, salt) == expected
        lease = self.cache.acquire(tokens, salt)
        pages = expected // self.stride
        assert lease.num_cached_tokens == expected
        assert lease.num_shared_pages == len(lease.page_ids) == pages
        sequence = Sequence(lease, salt, list(tokens), expected, pages)
        self.running.append(sequence)
        self.history.append((sequence.tokens, salt))
        return sequence

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        held = list(sequence.lease.page_ids)
        missing = max(0, -(-num_tokens // self.stride) - len(held))
        shortage = missing - self.num_free()
        fits = shortage <= len(self.unleased()) and self.window_fits(sequence, num_tokens)
        others = self.tables()
        assert self.cache.reserve(sequence.lease, num_tokens, self.window_tokens(sequence)) == fits
        new = sequence.lease.page_ids[len(held) :]
        assert sequence.lease.page_ids[: len(held)] == held
        assert len(new) == len(set(new)) == (missing if fits else 0)
        assert not others & set(new)
        for page_id in new:
            self.memory[page_id] = [None] * self.stride
        for _ in range(shortage if fits else 0):
            self.evict_one()
        if fits:
            self.grew(sequence)
        return fits

    def window_tokens(self, sequence: Sequence) -> int | None:
        """Tokens that window pages are reserved for."""
        return None

    def window_fits(self, sequence: Sequence, num_tokens: int) -> bool:
        return True

    def grew(self, sequence: Sequence) -> None:
        """Follows a lease that got its pages."""

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Writes K/V up to `num_tokens`, as far as there are tokens and pages."""
        lease = sequence.lease
        stop = min(num_tokens, len(sequence.tokens), lease.num_pages * self.stride)
        for position in range(sequence.num_computed, stop):
            index, slot = divmod(position, self.stride)
            page_id = lease.page_ids[index]
            assert index >= lease.num_shared_pages, "a shared page would be written"
            assert sum(page_id in other.lease.page_ids for other in self.running) == 1
            self.memory[page_id][slot] = sequence.prefix(position + 1)
        sequence.num_computed = max(stop, sequence.num_computed)

    def publish(self, sequence: Sequence, whole: bool) -> None:
        if whole:
            self.cache.publish(sequence.lease, sequence.tokens[: sequence.num_computed])
        else:
            self.cache.publish(sequence.lease, sequence.tokens, sequence.num_computed)
        if self.name == "trie" and not sequence.is_retracted:
            sequence.num_published_pages = sequence.num_computed // self.stride
        for prefix in self.own_prefixes(sequence):
            self.published.setdefault(prefix, 0)
        assert sequence.lease.num_shared_pages == sequence.num_published_pages

    def stop(self, sequence: Sequence) -> None:
        self.clock += 1
        for prefix in self.own_prefixes(sequence):
            self.published[prefix] = self.clock
        self.running.remove(sequence)
        self.cache.release(sequence.lease)

    # Rules

    def some(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.running))

    @rule(tokens=TOKENS, salt=SALTS)
    def acquire(self, tokens: list[int], salt: str | None) -> None:
        self.start(tokens, salt)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def acquire_again(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn of a conversation, or the same prompt again."""
        tokens, salt = data.draw(st.sampled_from(self.history[-6:]))
        self.start(tokens[:9] + more, salt)

    @rule(tokens=TOKENS, salt=SALTS, more=st.integers(0, 3))
    def serve(self, tokens: list[int], salt: str | None, more: int) -> None:
        """Starts, computes and finishes a request in one step."""
        sequence = self.start(tokens, salt)
        if self.grow(sequence, len(tokens) + more):
            self.compute(sequence, len(tokens))
            self.publish(sequence, whole=True)
        self.stop(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 3))
    def reserve(self, data: st.DataObject, more: int) -> None:
        sequence = self.some(data)
        self.grow(sequence, len(sequence.tokens) + more)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def reserve_part(self, data: st.DataObject, num_tokens: int) -> None:
        self.grow(self.some(data), num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute_some(self, data: st.DataObject, num_tokens: int) -> None:
        sequence = self.some(data)
        self.compute(sequence, sequence.num_computed + num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def publish_computed(self, data: st.DataObject, whole: bool) -> None:
        self.publish(self.some(data), whole)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        """Computes the rest, publishes it and samples a token, if there are enough pages."""
        sequence = self.some(data)
        if self.grow(sequence, len(sequence.tokens) + 1):
            self.compute(sequence, len(sequence.tokens))
            self.publish(sequence, whole=False)
            sequence.tokens.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        sequence = self.some(data)
        self.stop(sequence)
        if twice:
            self.cache.release(sequence.lease)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), stops=st.booleans())
    def retract(self, data: st.DataObject, stops: bool) -> None:
        """Withdraws its first page and all continuations of it; leases that hold them keep them."""
        sequence = self.some(data)
        prefixes = self.own_prefixes(sequence)
        for other in self.running:
            other.is_retracted |= bool(prefixes) and prefixes[0] in self.own_prefixes(other)
        for salt, tokens in list(self.published):
            if prefixes and (salt, tokens[: self.stride]) == prefixes[0]:
                del self.published[salt, tokens]
        self.cache.retract(sequence.lease)
        if stops:
            self.stop(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Releases the lease and starts again with the tokens generated so far."""
        sequence = self.some(data)
        self.stop(sequence)
        self.start(sequence.tokens, sequence.salt)

    @rule()
    def flush(self) -> None:
        evicted = self.unleased()
        assert self.cache.flush() == len(evicted)
        for prefix in evicted:
            del self.published[prefix]

    @rule(has_room=st.booleans())
    def fill_mirror(self, has_room: bool) -> None:
        self.mirror.has_room = has_room

    @rule(tokens=TOKENS, salt=SALTS)
    def look_up(self, tokens: list[int], salt: str | None) -> None:
        assert self.cache.match_length(tokens, salt) == self.published_prefix(tokens, salt)

    # Invariants after each rule

    @invariant()
    def every_page_has_its_owner(self) -> None:
        self.cache.check_integrity()
        free, cached, leased = self.num_free(), len(self.unleased()), len(self.tables())
        assert self.cache.usage() == CacheUsage(total=self.total, free=free, cached=cached, leased=leased)
        assert SCRATCH_PAGE not in self.tables()
        cached_page_ids = self.cache.cached_page_ids()
        assert len(set(cached_page_ids)) == len(cached_page_ids) == cached
        assert not {SCRATCH_PAGE, *self.tables()} & set(cached_page_ids)

    @invariant()
    def the_mirror_has_the_published_pages(self) -> None:
        published, told = set(self.published), len(self.mirror.events) - self.num_told
        if published != self.last_published:
            assert bool(told) == self.mirror.has_room
            self.is_mirror_behind |= not told
        self.is_mirror_behind &= not told
        self.last_published, self.num_told = published, self.num_told + told
        mirrored = list(self.mirror.pages.values())
        assert self.is_mirror_behind or (set(mirrored) == published and len(mirrored) == len(published))

    @invariant()
    def every_sequence_reads_its_own_content(self) -> None:
        for sequence in self.running:
            for position in range(sequence.num_computed):
                index, slot = divmod(position, self.stride)
                content = self.memory[sequence.lease.page_ids[index]][slot]
                assert content == sequence.prefix(position + 1)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in list(self.running):
            self.stop(sequence)
        self.cache.flush()
        self.cache.check_integrity()
        assert self.cache.usage() == CacheUsage(total=self.total, free=self.total, cached=0, leased=0)
