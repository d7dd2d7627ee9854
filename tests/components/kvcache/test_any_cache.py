"""Invariants of every KV cache, tested against a brute-force model of the device's memory."""

from __future__ import annotations

import pytest
from hypothesis import settings

from shortfin_apps.llm.components.kvcache import CacheUsage, KVCache, PrefixCache, make_cache
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache
from tests.components.kvcache.cache_machine import CacheMachine


class BaseMachine(CacheMachine):
    name = "none"


class TrieMachine(CacheMachine):
    name = "trie"


TestBase = BaseMachine.TestCase
TestBase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(("name", "kind"), [("none", KVCache), ("trie", TrieCache)])
def test_make_cache(name: PrefixCache, kind: type[KVCache]) -> None:
    cache = make_cache(name, num_pages=5, stride=16)
    assert type(cache) is kind
    assert cache.stride == 16
    assert cache.usage() == CacheUsage(total=4, free=4, cached=0, leased=0)
