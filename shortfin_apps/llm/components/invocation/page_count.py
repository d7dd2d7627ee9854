"""How many pages the KV cache has: what a device has memory for, and how many of them are of windows.

Where some layers see a window of tokens alone, those have pages of their own, of which a request holds a
bounded number. A request of L tokens holds pages for all of them, and window pages for min(L, window); so
both kinds are used up together by requests of one length, and shorter ones use up the window pages first.

Where all layers see a window, all memory is that of window pages; other pages are names, by which prefixes
are known, and take none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.config import ModelConfig

# Of the context: the length of requests that use up pages and window pages together.
BALANCED_SHARE = 4


def least_window_pages(config: ModelConfig, tokens_ahead: int) -> int:
    """Window pages, with the scratch page, with which any request can run alone.

    It holds those that the next `tokens_ahead` tokens see, and as they are given up when a page is full, one
    more.
    """
    assert config.window_tokens is not None
    return 1 + -(-(config.window_tokens + tokens_ahead) // config.stride) + 2


def window_page_count(config: ModelConfig, num_pages: int, tokens_ahead: int | None) -> int:
    """Window pages, with the scratch page, beside `num_pages` pages; 0 for a model without windows.

    `tokens_ahead` is the mode's (None: a whole prompt may be reserved at once). Beside the least that any
    request needs, as many as requests of 1 / BALANCED_SHARE of the context hold that fill the other pages.
    """
    if config.window_tokens is None:
        return 0
    if tokens_ahead is None or not config.has_window_table:
        return num_pages
    of_requests = BALANCED_SHARE * num_pages * _held(config) * config.stride // config.max_seq_len
    return min(num_pages, least_window_pages(config, tokens_ahead) + of_requests)


def _held(config: ModelConfig) -> int:
    """Window pages of a request that decodes."""
    assert config.window_tokens is not None
    return -(-config.window_tokens // config.stride) + 2


def named_page_count(config: ModelConfig, num_pages: int) -> int:
    """Pages of the cache, with the scratch page, beside the window pages, if there is memory for `num_pages`.

    Where these are names, as many as requests of whole contexts need that use up the window pages.
    """
    if config.window_tokens is None or config.has_window_table:
        return num_pages
    of_context = -(-config.max_seq_len // config.stride)
    return 1 + -(-(num_pages - 1) * of_context // min(of_context, _held(config)))


def page_counts(config: ModelConfig, num_pages: int, num_window_pages: int) -> list[int]:
    """The pages of each slab."""
    counts = [num_pages] * len(config.page_elements)
    return counts if config.window_tokens is None else [*counts[:-1], num_window_pages]


def page_table_bytes(config: ModelConfig, num_pages: int, num_window_pages: int) -> int:
    """Bytes of all slabs."""
    counts = page_counts(config, num_pages, num_window_pages)
    elements = sum(count * size for count, size in zip(counts, config.page_elements, strict=True))
    return elements * config.paged_kv_cache.dtype.itemsize


def pages_that_fit(
    device: Device,
    program: Program,
    config: ModelConfig,
    max_running: int,
    tokens_ahead: int | None = None,
    taken_beside: Callable[[int], int] = lambda num_pages: 0,
) -> int | None:
    """Pages, with the scratch page, that there is memory for beside the program's results and workspace.

    At least those of one context, and at most those of `max_running`: more could only be kept for their
    prefixes. Window pages are counted as by `window_page_count`. `taken_beside` so many pages are other
    bytes of the first stage's memory. None where the device does not tell what it has.
    """
    context_pages = -(-config.max_seq_len // config.stride)
    most = 1 + max_running * context_pages
    fitting = []
    # The slab of windows lies beside the first one.
    num_stages = len(config.page_elements) - config.has_window_table
    for stage in range(num_stages):
        spare = device.spare_bytes(stage)
        if spare is None:
            return None
        taken = owned_bytes(program) if stage == 0 else 0
        beside = taken_beside if stage == 0 else lambda num_pages: 0
        fitting.append(_pages_within(config, stage, spare - taken, most, tokens_ahead, beside))
    return max(1 + context_pages, min(fitting))


def _pages_within(
    config: ModelConfig,
    stage: int,
    num_bytes: int,
    most: int,
    tokens_ahead: int | None,
    taken_beside: Callable[[int], int],
) -> int:
    """The most pages, up to `most`, whose slabs on the stage's device take at most `num_bytes` with what is
    `taken_beside` them."""
    itemsize = config.paged_kv_cache.dtype.itemsize
    window_elements = config.page_elements[-1] if config.has_window_table and stage == 0 else 0

    def taken(num_pages: int) -> int:
        window_pages = window_page_count(config, num_pages, tokens_ahead)
        elements = num_pages * config.page_elements[stage] + window_pages * window_elements
        return elements * itemsize + taken_beside(num_pages)

    return bisect_right(range(1, most + 1), num_bytes, key=taken)
