"""Creates the page table of a model on a device: the runner that owns the slabs, and the KV cache."""

from __future__ import annotations

import logging

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.page_count import (
    named_page_count,
    page_table_bytes,
)
from shortfin_apps.llm.components.kvcache import KVCache, PrefixCache, WindowOptions, make_cache
from shortfin_apps.llm.components.kvcache.events import PageListener
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError

logger = logging.getLogger(__name__)


def make_runner(
    device: Device,
    program: Program,
    config: ModelConfig,
    num_pages: int,
    num_window_pages: int | None = None,
    recorder: FlightRecorder | None = None,
) -> BatchRunner:
    """Create a runner of `program` with its own page table of `num_pages` pages, including the scratch page.

    Slabs of window pages or states have `num_window_pages` pages (None: `num_pages`). A `recorder` is
    notified of all invocations except the warm-up. Raises ArtifactError if the device has too little memory.
    """
    dtype = config.paged_kv_cache.dtype
    num_window_pages = num_pages if num_window_pages is None else num_window_pages
    only_dispatches = all(entry.only_dispatches for entry in program.entries.values())
    try:
        page_table = [
            device.allocate(
                (num_pages if slab.pool == "whole" else num_window_pages, slab.elements),
                dtype,
                stage=slab.stage,
                only_dispatches=only_dispatches,
            )
            for slab in config.slabs
        ]
    except Exception as error:  # the runtimes have no common exception for missing memory
        size = page_table_bytes(config, num_pages, num_window_pages)
        raise ArtifactError(
            f"no memory for a KV cache of {num_pages} pages ({size / 2**30:.1f} GiB); give fewer --pages"
        ) from error
    return BatchRunner(device, program, config, page_table=page_table, recorder=recorder)


def make_page_cache(
    config: ModelConfig,
    prefix_cache: PrefixCache,
    num_pages: int,
    num_window_pages: int,
    listener: PageListener | None = None,
) -> KVCache:
    """Create the KV cache that leases a runner's pages; `listener` is notified of published pages."""
    window = None
    if config.window_tokens is not None:
        holds_states = "state" in config.pools
        window = WindowOptions(
            tokens=config.window_tokens, num_pages=num_window_pages, holds_states=holds_states
        )
        num_pages = named_page_count(config, num_pages)
    if config.has_window_table:
        logger.info(
            "%d pages for the layers that see the last %d tokens alone, %d for the others",
            num_window_pages,
            config.window_tokens,
            num_pages,
        )
    return make_cache(_prefix_cache(config, prefix_cache), num_pages, config.stride, window, listener)


def _prefix_cache(config: ModelConfig, asked: PrefixCache) -> PrefixCache:
    if asked != "none" and not config.has_prefill_position:
        logger.warning("the model has no prefill position, so prefixes cannot be shared: cache is `none`")
        return "none"
    return asked
