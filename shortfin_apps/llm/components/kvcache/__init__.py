"""KV caches: page accounting without prefix sharing (cache.py) or with prefix sharing (trie_cache.py)."""

from __future__ import annotations

from typing import Literal

from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.events import PageListener
from shortfin_apps.llm.components.kvcache.lease import SCRATCH_PAGE, CacheUsage, Lease, WindowOptions
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache

__all__ = ["SCRATCH_PAGE", "CacheUsage", "KVCache", "Lease", "PrefixCache", "WindowOptions", "make_cache"]

PrefixCache = Literal["none", "trie"]


def make_cache(
    name: PrefixCache,
    num_pages: int,
    stride: int,
    window: WindowOptions | None = None,
    listener: PageListener | None = None,
) -> KVCache:
    """Create a cache over `num_pages` pages, including the scratch page, of `stride` tokens each.

    With `window`, sliding-window layers have a separate page table. `listener` is notified of published
    pages; only `trie` publishes pages.
    """
    if name == "trie":
        return TrieCache(num_pages, stride, window, listener)
    return KVCache(num_pages, stride, window)
