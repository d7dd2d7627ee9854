"""KV caches: page accounting with and without sharing of prefixes, behind one interface (`base.py`)."""

from __future__ import annotations

from typing import Literal

from shortfin_apps.llm.components.kvcache.base import SCRATCH_PAGE, CacheUsage, KVCache, Lease, WindowOptions
from shortfin_apps.llm.components.kvcache.base_cache import BaseCache
from shortfin_apps.llm.components.kvcache.events import PageListener
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
    """A cache over a page table of `num_pages` pages, scratch page included, of `stride` tokens each.

    With `window`, layers that see a window of tokens alone have a page table of their own. `listener` is told
    which pages are published, which none are where prefixes are not shared.
    """
    if name == "trie":
        return TrieCache(num_pages, stride, window, listener)
    return BaseCache(num_pages, stride, window)
