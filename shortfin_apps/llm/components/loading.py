"""Assembles an engine: device, program, page table, cache, batching mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.mode import ModeOptions
from shortfin_apps.llm.components.batching.modes.auto import AutoModeOptions
from shortfin_apps.llm.components.batching.scheduler import DEFAULT_SCHEDULING, Scheduler, SchedulingOptions
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.limits import ModelLimits
from shortfin_apps.llm.components.frontend.async_engine import MAX_QUEUE_TOKENS, STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.page_count import (
    named_page_count,
    page_counts,
    page_table_bytes,
    pages_that_fit,
    window_page_count,
)
from shortfin_apps.llm.components.kvcache import KVCache, PrefixCache, WindowOptions, make_cache
from shortfin_apps.llm.components.runtime.check import check_program, check_results, check_vocabulary
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.runtime.names import GPU_NAMES
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.components.runtime.parameters import embedding_rows
from shortfin_apps.llm.components.speculation.draft import (
    CPU_ROW_COST,
    DEFAULT_MAX_TOKENS,
    GPU_ROW_COST,
    MAX_FORCED_TOKENS,
    SpeculationOptions,
)
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # what is done, and what is to be done in all
UseDecodeLoops = Literal["auto", "on", "off"]
Speculative = Literal["off", "ngram"]
JumpAhead = Literal["auto", "on", "off"]
Pages = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to serve a model; None leaves a choice to the artefact or the machine.

    `pages` is the size of the page table, "auto" what the device has memory for; None is "auto" on GPUs, and
    on CPUs, where other programs live, the size in `config.json`. `max_running` is the most requests in
    progress at once (default: the mode's own), `max_queue` the most that wait besides them,
    `max_queue_tokens` the most prompt tokens that wait. `decode_ahead` is whether decode loops are used:
    "auto" where the VMFB has them, "on" needs them. `speculative` says where proposed tokens come from,
    `speculative_tokens` how many a request gets at most; `jump_ahead` is whether those that grammars force
    are proposed: "auto" where the model takes proposed tokens, "on" needs that. `vocab_size` is the size of
    the model's vocabulary by its manifest, which the tokenizer's must fit. `stall_timeout_s` is how long a
    step may take.
    """

    device: str = "cpu"
    device_ids: tuple[str, ...] = ()
    runtime: Runtime = "auto"
    threads: int | None = None
    mode: ModeOptions = field(default_factory=AutoModeOptions)
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING
    prefix_cache: PrefixCache = "trie"
    decode_ahead: UseDecodeLoops = "auto"
    speculative: Speculative = "off"
    speculative_tokens: int = DEFAULT_MAX_TOKENS
    jump_ahead: JumpAhead = "auto"
    pages: Pages | None = None
    max_running: int | None = None
    max_queue: int = 0
    max_queue_tokens: int = MAX_QUEUE_TOKENS
    vocab_size: int | None = None
    tokenizer_vocab_size: int | None = None
    stall_timeout_s: float = STALL_TIMEOUT_S


def load_engine(
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    options: EngineOptions,
    confirm: Callable[[], None] = lambda: None,
    on_warm_up: OnProgress = lambda done, total: None,
) -> AsyncEngine:
    """Loads, checks and warms up; the engine is ready for `start`. Takes seconds. Raises ArtifactError.

    `confirm` is called last; if it raises, the device is closed and the error passed on.
    """
    device = open_device(
        options.device, options.runtime, threads=options.threads, device_ids=options.device_ids
    )
    try:
        engine = make_engine(device, config, vmfb, parameters, eos_token_ids, options, on_warm_up)
        confirm()
    except BaseException:
        device.close()
        raise
    return AsyncEngine(
        engine,
        max_requests=engine.max_running + options.max_queue,
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
    on_warm_up: OnProgress = lambda done, total: None,
) -> Engine:
    """The engine alone, on a device that the caller owns; it runs when the caller calls `step`.

    `on_warm_up` is told the number of entries that have run once, and of all.
    """
    check_vocabulary(options.vocab_size, options.tokenizer_vocab_size)
    program = device.load_program(vmfb, parameters, config.module_name)
    check_program(program, config, options.tokenizer_vocab_size)
    check_vocabulary(embedding_rows(parameters), options.tokenizer_vocab_size)
    on_gpu = options.device in GPU_NAMES
    buckets = Buckets(program.entries, config.stride, has_prefill_position=config.has_prefill_position)
    speculation = _speculation(config, buckets, options, on_gpu=on_gpu)
    mode = options.mode.chosen(buckets, on_gpu=on_gpu)
    max_running = options.max_running or mode.default_max_running(config)
    batch_mode = mode.make(config, buckets, on_gpu=on_gpu)
    tokens_ahead = batch_mode.tokens_ahead(config.stride)
    num_pages = _num_pages(device, program, config, options, max_running, tokens_ahead)
    num_window_pages = window_page_count(config, num_pages, tokens_ahead)
    runner = make_runner(device, program, config, num_pages, num_window_pages)
    logger.info("batch mode %s", next(name for name, kind in BATCH_MODES.items() if type(mode) is kind))
    if options.decode_ahead == "on" and not runner.buckets.has_decode_loops:
        raise ArtifactError(
            "the VMFB has no decode loops, which `--decode-ahead on` needs; rebuild it with `shortfin-llm "
            "build --decode-loop-sizes 1,2,4,8`, or leave that option out"
        )
    cache = _cache(config, options, num_pages, num_window_pages)
    warmed_up = runner.warm_up(on_warm_up)
    for entry in warmed_up:
        check_results(entry, config, options.tokenizer_vocab_size)
    logger.info(
        "warmed up %d entries; the KV cache, results and workspace take %.1f MiB",
        len(warmed_up),
        runner.num_bytes / 2**20,
    )
    return Engine(
        scheduler=Scheduler(cache, batch_mode, max_running, options.scheduling),
        cache=cache,
        runner=runner,
        limits=ModelLimits(max_seq_len=config.max_seq_len, eos_token_ids=eos_token_ids),
        decode_ahead=options.decode_ahead != "off",
        speculation=speculation,
    )


def _speculation(
    config: ModelConfig, buckets: Buckets, options: EngineOptions, *, on_gpu: bool
) -> SpeculationOptions | None:
    """None where nothing is proposed. Raises ArtifactError where the model cannot do what was asked for."""
    looks_up, jumps = options.speculative == "ngram", options.jump_ahead != "off"
    if not looks_up and not jumps:
        return None
    flag = "--speculative" if looks_up else "--jump-ahead on"
    if problem := _problem_with_proposals(config, buckets, flag):
        if looks_up or options.jump_ahead == "on":
            raise ArtifactError(problem)
        return None
    return SpeculationOptions(
        max_tokens=options.speculative_tokens if looks_up else 0,
        max_forced_tokens=MAX_FORCED_TOKENS if jumps else 0,
        row_cost=GPU_ROW_COST if on_gpu else CPU_ROW_COST,
    )


def _problem_with_proposals(config: ModelConfig, buckets: Buckets, flag: str) -> str | None:
    """Why the model takes no proposed tokens, for which `flag` asks; None if it does."""
    if config.paged_kv_cache.state_block_count is not None:
        return (
            "the model has layers that keep a state, which cannot go back to before a rejected token; "
            f"leave out `{flag}`"
        )
    if not buckets.has_packed_extend:
        return (
            f"the VMFB has no packed `extend` entry, which `{flag}` needs; rebuild it with "
            "`shortfin-llm build`, or leave that option out"
        )
    return None


def _num_pages(
    device: Device,
    program: Program,
    config: ModelConfig,
    options: EngineOptions,
    max_running: int,
    tokens_ahead: int | None,
) -> int:
    """Raises ArtifactError for too few."""
    recorded = config.paged_kv_cache.device_block_count
    chosen = options.pages or ("auto" if options.device in GPU_NAMES else recorded)
    if chosen == "auto":
        return _pages_that_fit(device, program, config, max_running, tokens_ahead) or recorded
    if chosen < 2:
        raise ArtifactError("the page table needs at least 2 pages: the first is scratch; raise `--pages`")
    return chosen


def _pages_that_fit(
    device: Device, program: Program, config: ModelConfig, max_running: int, tokens_ahead: int | None
) -> int | None:
    found = pages_that_fit(device, program, config, max_running, tokens_ahead)
    if found is None:
        logger.warning(
            "%s does not tell how much memory is free: the KV cache has the size in config.json; "
            "`--pages` sets it",
            device.name,
        )
        return None
    num_bytes = page_table_bytes(config, found, window_page_count(config, found, tokens_ahead))
    logger.info(
        "the KV cache takes %.1f GiB of the memory that is left: %d pages of %d tokens (`--pages`)",
        num_bytes / 2**30,
        found,
        config.stride,
    )
    return found


def make_runner(
    device: Device, program: Program, config: ModelConfig, num_pages: int, num_window_pages: int | None = None
) -> BatchRunner:
    """A runner of `program` with a page table of its own: `num_pages` pages, the scratch page included.

    The slab of layers with a window has `num_window_pages` (None: as many). Raises
    ArtifactError when the device has too little memory for them.
    """
    dtype = config.paged_kv_cache.dtype
    num_window_pages = num_pages if num_window_pages is None else num_window_pages
    counts = page_counts(config, num_pages, num_window_pages)
    only_dispatches = all(entry.only_dispatches for entry in program.entries.values())
    # The slab of windows lies on the device of the first stage, as no model has both windows and stages.
    stages = [0, 0] if config.has_window_table else range(len(counts))
    try:
        page_table = [
            device.allocate((count, elements), dtype, stage=stage, only_dispatches=only_dispatches)
            for stage, count, elements in zip(stages, counts, config.page_elements, strict=True)
        ]
    except Exception as error:  # the runtimes have no common exception for it
        size = page_table_bytes(config, num_pages, num_window_pages)
        raise ArtifactError(
            f"no memory for a KV cache of {num_pages} pages ({size / 2**30:.1f} GiB); give fewer --pages"
        ) from error
    return BatchRunner(device, program, config, page_table=page_table)


def _cache(config: ModelConfig, options: EngineOptions, num_pages: int, num_window_pages: int) -> KVCache:
    window = None
    if config.window_tokens is not None:
        window = WindowOptions(tokens=config.window_tokens, num_pages=num_window_pages)
        num_pages = named_page_count(config, num_pages)
    if config.has_window_table:
        logger.info(
            "%d pages for the layers that see the last %d tokens alone, %d for the others",
            num_window_pages,
            config.window_tokens,
            num_pages,
        )
    return make_cache(_prefix_cache(config, options), num_pages, config.stride, window)


def _prefix_cache(config: ModelConfig, options: EngineOptions) -> PrefixCache:
    if options.prefix_cache != "none" and not config.has_prefill_position:
        logger.warning("the model has no prefill position, so prefixes cannot be shared: cache is `none`")
        return "none"
    return options.prefix_cache
