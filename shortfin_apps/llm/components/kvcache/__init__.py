"""KV caches: page accounting with and without sharing of prefixes, behind one interface (`base.py`)."""

from __future__ import annotations

from typing import Literal

from shortfin_apps.llm.components.kvcache.base import SCRATCH_PAGE, CacheUsage, KVCache, Lease, WindowOptions
from shortfin_apps.llm.components.kvcache.base_cache import BaseCache
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache

__all__ = ["SCRATCH_PAGE", "CacheUsage", "KVCache", "Lease", "PrefixCache", "WindowOptions", "make_cache"]

PrefixCache = Literal["none", "trie"]

_CACHES: dict[PrefixCache, type[BaseCache]] = {"none": BaseCache, "trie": TrieCache}


def make_cache(
    name: PrefixCache, num_pages: int, stride: int, window: WindowOptions | None = None
) -> KVCache:
    """A cache over a page table of `num_pages` pages, scratch page included, of `stride` tokens each.

    With `window`, layers that see a window of tokens alone have a page table of their own.
    """
    return _CACHES[name](num_pages, stride, window)
