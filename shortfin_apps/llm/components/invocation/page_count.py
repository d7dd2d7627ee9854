"""Page counts of the KV cache: how many fit in a device's memory, and how many are window pages.

If only some layers use a sliding window, these layers have separate pages, of which a request holds a bounded
number. A request of L tokens holds pages for all of them, and window pages for min(L, window). Requests of
one length therefore exhaust both kinds together, and shorter ones exhaust the window pages first.

If all layers use a window, window pages take all memory; other pages are only names that identify prefixes,
and take none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.contract.config import ModelConfig

# Requests of 1 / BALANCED_SHARE of the context length exhaust pages and window pages together.
BALANCED_SHARE = 4


def least_window_pages(config: ModelConfig, tokens_ahead: int) -> int:
    """Minimum number of window pages, including the scratch page, with which any request can run alone.

    A request holds the pages that its next `tokens_ahead` tokens see, and one more because pages are only
    given up when full.
    """
    assert config.window_tokens is not None
    return 1 + -(-(config.window_tokens + tokens_ahead) // config.stride) + 2


def window_page_count(config: ModelConfig, num_pages: int, tokens_ahead: int | None) -> int:
    """Window pages, including the scratch page, to go with `num_pages` pages; 0 for a model without windows.

    `tokens_ahead` is the mode's (None: a full prompt may be reserved at once). Adds, to the minimum for one
    request, the window pages of enough requests of 1 / BALANCED_SHARE of the context length to fill the other
    pages.
    """
    if config.window_tokens is None:
        return 0
    if tokens_ahead is None or not config.has_window_table:
        return num_pages
    of_requests = BALANCED_SHARE * num_pages * _held(config) * config.stride // config.max_seq_len
    return min(num_pages, least_window_pages(config, tokens_ahead) + of_requests)


def _held(config: ModelConfig) -> int:
    """Window pages of a decoding request."""
    assert config.window_tokens is not None
    return -(-config.window_tokens // config.stride) + 2


def named_page_count(config: ModelConfig, num_pages: int) -> int:
    """Pages of the cache including the scratch page, given memory for `num_pages`.

    If pages are only names, returns the number that full-context requests need to exhaust the window pages.
    """
    if config.window_tokens is None or config.has_window_table:
        return num_pages
    of_context = -(-config.max_seq_len // config.stride)
    return 1 + -(-(num_pages - 1) * of_context // min(of_context, _held(config)))


def page_table_bytes(
    config: ModelConfig, num_pages: int, num_window_pages: int, stage: int | None = None
) -> int:
    """Bytes of the slabs of a pipeline stage (None: of all)."""
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
    """Number of pages that fit in memory next to the program's results and workspace, with the scratch page.

    At least the pages of one context, and at most of `max_running` contexts: more pages could only be kept
    for their prefixes. Window pages are counted as by `window_page_count`. `taken_beside` returns other bytes
    taken of the first stage's memory for a number of pages. Returns None if the device does not report its
    memory.
    """
    context_pages = -(-config.max_seq_len // config.stride)
    most = 1 + max_running * context_pages
    own_bytes, fitting = owned_bytes(program), []

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
