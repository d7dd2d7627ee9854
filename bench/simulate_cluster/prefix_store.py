"""Tracks which prefixes a memory of limited tokens holds; the least recently used are dropped first."""

from __future__ import annotations

from collections.abc import Callable

GROUP, CONVERSATION = 0, 1
Key = tuple[int, int]  # (GROUP or CONVERSATION, number)


class PrefixStore:
    """A trie of two levels: groups' prefixes, and the tokens that conversations added to them.

    A conversation's part is kept or dropped as a unit. A group is touched after each of its conversations, so
    it is never dropped before them. Pinned keys are kept, so `size` may exceed the capacity.
    """

    def __init__(self, capacity: int, on_drop: Callable[[Key], None] = lambda key: None) -> None:
        self._capacity = capacity
        self._on_drop = on_drop
        self._tokens: dict[Key, int] = {}  # least recently used first
        self._pins: dict[Key, int] = {}
        self.size = 0
        self.pinned_tokens = 0

    def held(self, group: int, conversation: int) -> int:
        """Return how many leading tokens of the conversation's prompts are held."""
        prefix = self._tokens.get((GROUP, group), 0)
        return prefix + self._tokens.get((CONVERSATION, conversation), 0) if prefix else 0

    def put(
        self, group: int, prefix_tokens: int, conversation: int, tokens: int, *, pin: bool = False
    ) -> None:
        """Mark both as just used, the conversation with `tokens` after the prefix; pin them if asked."""
        keys = (CONVERSATION, conversation), (GROUP, group)
        for key, size in zip(keys, (tokens, prefix_tokens), strict=True):
            self._touch(key, size)
            if pin:
                self._pin(key)
        self._drop_excess()

    def unpin(self, group: int, conversation: int) -> None:
        for key in ((CONVERSATION, conversation), (GROUP, group)):
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self.pinned_tokens -= self._tokens[key]
        self._drop_excess()

    def _pin(self, key: Key) -> None:
        count = self._pins.get(key, 0)
        self._pins[key] = count + 1
        if not count:
            self.pinned_tokens += self._tokens[key]

    def _touch(self, key: Key, tokens: int) -> None:
        before = self._tokens.pop(key, 0)
        self._tokens[key] = tokens
        self.size += tokens - before
        if key in self._pins:
            self.pinned_tokens += tokens - before

    def _drop_excess(self) -> None:
        excess = self.size - self._capacity
        if excess <= 0:
            return
        dropped = []
        for key, tokens in self._tokens.items():
            if excess <= 0:
                break
            if key not in self._pins:
                dropped.append(key)
                excess -= tokens
        for key in dropped:
            self.size -= self._tokens.pop(key)
            self._on_drop(key)
