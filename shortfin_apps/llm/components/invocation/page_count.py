"""Page counts of the KV cache: how many fit in a device's memory, and how many are window pages.

If only some layers use a sliding window, these layers have separate window pages. A request of L tokens holds
pages for L tokens, and window pages for min(L, window) tokens. For given page counts, requests of one certain
length exhaust both kinds of pages together, and shorter requests exhaust the window pages first.

If all layers use a window, window pages take all the memory. Other pages are then virtual: their IDs only
identify prefixes, and they have no memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.invocation.slot_tables import table_bytes
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.contract.config import ModelConfig

# Requests of 1 / BALANCED_SHARE of the context length exhaust pages and window pages together.
BALANCED_SHARE = 4


def least_window_pages(config: ModelConfig, tokens_ahead: int) -> int:
    """Return the minimum window pages, including the scratch page, with which any request can run alone.

    A request holds the pages that its next `tokens_ahead` tokens write or attend to. It holds one more page,
    because a page is given up only when all of its tokens are outside the window.
    """
    assert config.window_tokens is not None
    return 1 + -(-(config.window_tokens + tokens_ahead) // config.stride) + 2


def window_page_count(config: ModelConfig, num_pages: int, tokens_ahead: int | None) -> int:
    """Return the number of window pages for `num_pages` pages, both including the scratch page.

    `tokens_ahead` is `BatchMode.tokens_ahead` (None: pages for a full prompt may be reserved at once). The
    result is the minimum for one request, plus the window pages of as many requests of 1 / BALANCED_SHARE of
    the context length as `num_pages` pages hold. It is 0 for a model without windows.
    """
    if config.window_tokens is None:
        return 0
    if tokens_ahead is None or not config.has_window_table:
        return num_pages
    of_requests = BALANCED_SHARE * num_pages * _held(config) * config.stride // config.max_seq_len
    return min(num_pages, least_window_pages(config, tokens_ahead) + of_requests)


def _held(config: ModelConfig) -> int:
    """Return the maximum number of window pages that a decoding request holds."""
    assert config.window_tokens is not None
    return -(-config.window_tokens // config.stride) + 2


def named_page_count(config: ModelConfig, num_pages: int) -> int:
    """Return the number of pages of the cache, including the scratch page, given memory for `num_pages`.

    If all layers use a window, `num_pages` are window pages. Other pages are then virtual, and the result is
    the number that full-context requests need to exhaust the window pages.
    """
    if config.window_tokens is None or config.has_window_table:
        return num_pages
    of_context = -(-config.max_seq_len // config.stride)
    return 1 + -(-(num_pages - 1) * of_context // min(of_context, _held(config)))


def page_table_bytes(
    config: ModelConfig, num_pages: int, num_window_pages: int, stage: int | None = None
) -> int:
    """Return the bytes of the slabs of a pipeline stage (None: of all stages)."""
    elements = sum(
        slab.elements * (num_pages if slab.pool == "whole" else num_window_pages)
        for slab in config.slabs
        if stage in (None, slab.stage)
    )
    return elements * config.paged_kv_cache.dtype.itemsize


def pages_that_fit(
    device: Device,
    program: Program,
    config: ModelConfig,
    max_running: int,
    tokens_ahead: int | None = None,
    taken_beside: Callable[[int], int] = lambda num_pages: 0,
) -> int | None:
    """Return how many pages, including the scratch page, fit in memory with the program's own buffers.

    The result is at least the pages of one context, even if these do not fit. It is at most the pages of
    `max_running` contexts: more pages could only be cached for their prefixes. `window_page_count` gives the
    number of window pages. `taken_beside` returns, for a number of pages, the other bytes taken of the first
    stage's memory. Returns None if the device does not report its memory.
    """
    context_pages = -(-config.max_seq_len // config.stride)
    most = 1 + max_running * context_pages
    own_bytes = owned_bytes(program.entries) + table_bytes(program.entries, max_running)
    fitting = []

    def taken(num_pages: int, stage: int) -> int:
        window_pages = window_page_count(config, num_pages, tokens_ahead)
        beside = own_bytes + taken_beside(num_pages) if stage == 0 else 0
        return page_table_bytes(config, num_pages, window_pages, stage) + beside

    for stage in dict.fromkeys(slab.stage for slab in config.slabs):
        spare = device.spare_bytes(stage)
        if spare is None:
            return None
        fitting.append(bisect_right(range(1, most + 1), spare, key=partial(taken, stage=stage)))
    return max(1 + context_pages, min(fitting))
