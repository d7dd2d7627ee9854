"""Puts an engine together: device, program, page table, cache, batching mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shortfin_apps.llm.components.batching import BATCH_MODES, BatchOptions, make_mode
from shortfin_apps.llm.components.batching.scheduler import DEFAULT_SCHEDULING, Scheduler, SchedulingOptions
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.limits import ModelLimits
from shortfin_apps.llm.components.frontend.async_engine import MAX_QUEUE_TOKENS, STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.components.invocation.invocation import BatchRunner
from shortfin_apps.llm.components.kvcache import PrefixCache, make_cache
from shortfin_apps.llm.components.runtime.check import (
    check_program,
    check_results,
    check_vocabulary,
    logits_width,
)
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.components.runtime.parameters import embedding_rows
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to serve a model; None leaves a choice to the artefact or the machine.

    `pages` overrides the page table's size, `max_running` is the most requests in progress at once
    (default: the mode's own), `max_queue` the most that wait beside them, `max_queue_tokens` the most
    prompt tokens that wait; SchedulingOptions explains the next three. `num_tokens` is the tokenizer's
    vocabulary, and `stall_timeout_s` how long a step may take.
    """

    device: str = "cpu"
    device_ids: tuple[str, ...] = ()
    runtime: Runtime = "auto"
    threads: int | None = None
    batch_mode: str = "default"
    prefix_cache: PrefixCache = "trie"
    chunk_tokens: int | None = None
    token_budget: int | None = None
    idle_budget: int | None = None
    prefills_per_decode: int = 1
    pages: int | None = None
    max_running: int | None = None
    max_queue: int = 256
    max_queue_tokens: int = MAX_QUEUE_TOKENS
    max_long_prefills: int = DEFAULT_SCHEDULING.max_long_prefills
    long_prefill_tokens: int = DEFAULT_SCHEDULING.long_prefill_tokens
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    stall_timeout_s: float = STALL_TIMEOUT_S


def load_engine(
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    options: EngineOptions,
    confirm: Callable[[], None] = lambda: None,
) -> AsyncEngine:
    """Loads, checks and warms up; the engine is ready for `start`. Takes seconds. Raises ArtifactError.

    `confirm` is called last; what it raises ends the loading.
    """
    device = open_device(
        options.device, options.runtime, threads=options.threads, device_ids=options.device_ids
    )
    try:
        engine = make_engine(device, config, vmfb, parameters, eos_token_ids, options)
        confirm()
    except BaseException:
        device.close()
        raise
    return AsyncEngine(
        engine,
        max_requests=max_running(config, options) + options.max_queue,
        max_queue_tokens=options.max_queue_tokens,
        stall_timeout_s=options.stall_timeout_s,
        on_close=device.close,
    )


def make_engine(
    device: Device,
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    options: EngineOptions,
) -> Engine:
    """The engine alone, on a device the caller owns: whoever calls `step` drives it."""
    num_pages = options.pages or config.paged_kv_cache.device_block_count
    if num_pages < 2:
        raise ArtifactError("the page table needs at least 2 pages: the first is scratch; raise `--pages`")
    batch_options = BatchOptions(
        chunk_tokens=options.chunk_tokens,
        token_budget=options.token_budget,
        idle_budget=options.idle_budget,
        prefills_per_decode=options.prefills_per_decode,
    )
    program = device.load_program(vmfb, parameters, config.module_name)
    check_program(program, config)
    check_vocabulary(embedding_rows(parameters), options.num_tokens)
    for entry in program.entries.values():
        check_vocabulary(logits_width(entry, config), options.num_tokens)
    runner = make_runner(device, program, config, num_pages)
    mode = make_mode(options.batch_mode, config, batch_options, any_chunk=runner.buckets.takes_any_chunk)
    cache = make_cache(_prefix_cache(config, options), num_pages, config.stride)
    if BATCH_MODES[options.batch_mode].needs_extend_entries and not runner.buckets.has_extend:
        raise ArtifactError(
            f"the VMFB has no `extend` entry, which batch mode {options.batch_mode} needs; "
            "rebuild it with `shortfin-llm build`, or use `--batch-mode default`"
        )
    for entry in runner.warm_up():
        check_results(entry, config)
        check_vocabulary(logits_width(entry, config), options.num_tokens)
    scheduling = SchedulingOptions(
        max_long_prefills=options.max_long_prefills,
        long_prefill_tokens=options.long_prefill_tokens,
        tenant_weights=options.tenant_weights,
    )
    return Engine(
        scheduler=Scheduler(cache, mode, max_running(config, options), scheduling),
        cache=cache,
        runner=runner,
        limits=ModelLimits(max_seq_len=config.max_seq_len, eos_token_ids=eos_token_ids),
    )


def make_runner(device: Device, program: Program, config: ModelConfig, num_pages: int) -> BatchRunner:
    """Runs batches of `program` on a page table of its own, `num_pages` with the scratch page.

    Raises ArtifactError when the device has no memory for so many.
    """
    dtype = config.paged_kv_cache.dtype
    only_dispatches = all(entry.only_dispatches for entry in program.entries.values())
    try:
        page_table = [
            device.allocate((num_pages, elements), dtype, stage=stage, only_dispatches=only_dispatches)
            for stage, elements in enumerate(config.page_elements)
        ]
    except Exception as error:  # the runtimes have no common one for it
        size = num_pages * sum(config.page_elements) * dtype.itemsize
        raise ArtifactError(
            f"no memory for a KV cache of {num_pages} pages ({size / 2**30:.1f} GiB); give fewer --pages"
        ) from error
    return BatchRunner(device, program, config, page_table=page_table)


def max_running(config: ModelConfig, options: EngineOptions) -> int:
    return options.max_running or BATCH_MODES[options.batch_mode].default_max_running(config)


def _prefix_cache(config: ModelConfig, options: EngineOptions) -> PrefixCache:
    if options.prefix_cache != "none" and not config.has_prefill_position:
        logger.warning("the model has no prefill position, so prefixes cannot be shared: cache is `none`")
        return "none"
    return options.prefix_cache
