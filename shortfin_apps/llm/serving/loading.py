"""Assembles an engine: device, program, page table, cache, batching mode."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.components.batching import BATCH_MODES, make_mode
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.drafter import Drafter
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.padding_runs import warm_up
from shortfin_apps.llm.components.invocation.page_count import (
    page_table_bytes,
    pages_that_fit,
    window_page_count,
)
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.kv_events.options import KVEventsError, KVEventSettings
from shortfin_apps.llm.components.kvcache import KVCache
from shortfin_apps.llm.components.kvcache.events import PageListener
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.runtime.check import check_program, check_results, check_vocabulary
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.components.runtime.parameters import embedding_rows
from shortfin_apps.llm.components.self_test.locate import Locator
from shortfin_apps.llm.components.self_test.report import Subject
from shortfin_apps.llm.components.self_test.self_test import SelfTest
from shortfin_apps.llm.components.self_test.watch import SelfTestWatch
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, SelfTestError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.speculative_loading import (
    DraftFiles,
    DraftProgram,
    load_draft_program,
    make_draft_layer,
    make_draft_model,
    speculation_options,
)

if TYPE_CHECKING:  # an optional extra
    from shortfin_apps.llm.components.kv_events.publisher import KVEventPublisher

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # receives the numbers of items done and of all items


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts that an artefact states about its model.

    `vocab_size` is the model's vocabulary size in its manifest, which the tokenizer's must fit. `pages` is
    the size of the page table that was given to `build`. `kv_events_topic` is the default topic. Without
    `dumps`, there is no flight recorder. `self_test` holds the results that the program must reproduce before
    serving, where `same_bits` is whether all entries must give a position the same bits; a report of its
    failure names the artefact's `identity` and `kernels`.
    """

    vocab_size: int | None = None
    tokenizer_vocab_size: int | None = None
    draft_model: DraftFiles | None = None
    pages: int | None = None
    kv_events_topic: str = ""
    dumps: Header | None = None
    self_test: SelfTestFile | None = None
    same_bits: bool = False
    identity: str | None = None
    kernels: tuple[str, ...] = ()


NO_FACTS = ModelFacts()


def load_engine(
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    settings: EngineSettings,
    facts: ModelFacts = NO_FACTS,
    confirm: Callable[[], None] = lambda: None,
    on_warm_up: OnProgress = lambda done, total: None,
    *,
    tunes: bool = False,
) -> AsyncEngine:
    """Load, check and warm up an engine; callers must then call `start`. Takes seconds.

    `confirm` is called after loading, also after a failed self-test; if `confirm` raises, the device is
    closed and the error propagates. With `tunes`, the engine finally measures its token budget, unless the
    settings have one. Raises ArtifactError, SelfTestError and KVEventsError.
    """
    with ExitStack() as opened:
        publisher = None
        if settings.kv_events.kv_events_endpoint is not None:
            publisher = _publisher(settings.kv_events, facts.kv_events_topic, config.stride)
            opened.callback(publisher.close)
        device = open_device(
            settings.driver, settings.runtime, threads=settings.threads, device_ids=settings.device_ids
        )
        opened.callback(device.close)
        recorder = None if facts.dumps is None or settings.dump_dir == "off" else FlightRecorder()
        try:
            engine, watch = _make_engine(
                device,
                config,
                vmfb,
                parameters,
                eos_token_ids,
                settings,
                facts,
                on_warm_up,
                publisher,
                recorder,
            )
        except SelfTestError:
            confirm()  # raises for a damaged file, which explains the failure
            raise
        confirm()
        if tunes and settings.batching.token_budget is None:
            engine.tune(on_gpu=settings.is_on_gpu)  # last: verifying the parameters would compete for the CPU
        close = opened.pop_all().close
    return AsyncEngine(
        engine,
        max_requests=engine.max_running + settings.max_queue,
        max_queue_tokens=settings.queued_tokens,
        stall_timeout_s=settings.stall_timeout,
        on_close=close,
        dumps=_dumps(recorder, settings, facts, device.name, engine),
        idle_test=watch if settings.self_test == "hourly" else None,
    )


def _dumps(
    recorder: FlightRecorder | None, settings: EngineSettings, facts: ModelFacts, device: str, engine: Engine
) -> Dumps | None:
    if recorder is None or facts.dumps is None or settings.dump_dir == "off":
        return None
    stats, header = engine.stats(), facts.dumps
    header.device = f"{settings.device} ({device})"
    header.num_pages = stats.pages.total + 1
    header.num_window_pages = 0 if stats.window_pages is None else stats.window_pages.total + 1
    header.stride = stats.page_tokens
    dumps = Dumps(recorder, settings.dump_dir, header)
    dumps.check()
    return dumps


def _publisher(settings: KVEventSettings, default_topic: str, page_tokens: int) -> KVEventPublisher:
    try:
        from shortfin_apps.llm.components.kv_events.publisher import KVEventPublisher
    except ModuleNotFoundError as error:
        raise KVEventsError(
            f"KV events need {error.name}; install it with `pip install 'shortfin-llm[kv-events]'`"
        ) from error
    publisher = KVEventPublisher(
        settings, page_tokens, default_topic, hash_seed=os.environ.get("PYTHONHASHSEED")
    )
    logger.info("KV events at %s, topic %s", publisher.endpoint, publisher.topic)
    return publisher


def make_engine(
    device: Device,
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    settings: EngineSettings,
    facts: ModelFacts = NO_FACTS,
    on_warm_up: OnProgress = lambda done, total: None,
    listener: PageListener | None = None,
    recorder: FlightRecorder | None = None,
    *,
    jump_ahead: bool = True,
) -> Engine:
    """Create an engine on the caller's device. Callers must call `step` to run the engine.

    `on_warm_up` receives the numbers of entries that have run once and of all entries; `listener`, the
    published pages of the cache; `recorder`, the invocations on the device. With `jump_ahead`, tokens that a
    grammar forces are appended without a draw.
    """
    engine, _ = _make_engine(
        device,
        config,
        vmfb,
        parameters,
        eos_token_ids,
        settings,
        facts,
        on_warm_up,
        listener,
        recorder,
        jump_ahead=jump_ahead,
    )
    return engine


def _make_engine(
    device: Device,
    config: ModelConfig,
    vmfb: Path,
    parameters: Sequence[Path],
    eos_token_ids: frozenset[int],
    settings: EngineSettings,
    facts: ModelFacts,
    on_warm_up: OnProgress,
    listener: PageListener | None,
    recorder: FlightRecorder | None,
    *,
    jump_ahead: bool = True,
) -> tuple[Engine, SelfTestWatch | None]:
    """Return a new engine, and the self-test that the engine has passed, or None if none has run."""
    check_vocabulary(facts.vocab_size, facts.tokenizer_vocab_size)
    program = device.load_program(vmfb, parameters, config.module_name)
    check_program(program, config, facts.tokenizer_vocab_size)
    program = with_static_threshold(program, settings.static_threshold)
    check_vocabulary(embedding_rows(parameters), facts.tokenizer_vocab_size)
    on_gpu = settings.is_on_gpu
    buckets = Buckets(program.entries, config.stride, has_prefill_position=config.has_prefill_position)
    speculation = speculation_options(
        config,
        buckets,
        settings,
        has_draft_model=facts.draft_model is not None,
        on_gpu=on_gpu,
    )
    mode = make_mode(settings.batching, config, buckets, on_gpu=on_gpu)
    max_running = settings.max_running or mode.default_max_running(config, on_gpu=on_gpu)
    tokens_ahead = mode.tokens_ahead(config.stride)
    draft = _draft_program(device, settings, facts, max_running)
    num_pages = _num_pages(device, program, config, settings, facts, max_running, tokens_ahead, draft)
    num_window_pages = window_page_count(config, num_pages, tokens_ahead)
    runner = make_runner(device, program, config, num_pages, num_window_pages, recorder)
    logger.info("batch mode %s", next(name for name, each in BATCH_MODES.items() if each is type(mode)))
    _check_pipeline_depth(runner, settings)
    cache = make_page_cache(config, settings.prefix_cache, num_pages, num_window_pages, listener)
    _warm_up(runner, config, facts, on_warm_up)
    watch = _passed_self_test(device, program, config, runner, cache, settings, facts)
    drafter: Drafter | None = None
    if draft is not None:
        drafter = make_draft_model(device, draft, runner, num_pages * config.stride, settings.prefix_cache)
    elif settings.speculative == "mtp":
        drafter = make_draft_layer(runner, cache, config, settings)
    engine = Engine(
        scheduler=Scheduler(cache, mode, max_running, settings.batching.tenant_weights),
        cache=cache,
        runner=runner,
        max_seq_len=config.max_seq_len,
        eos_token_ids=eos_token_ids,
        depth=1 if settings.pipeline_depth is None else settings.pipeline_depth,
        jump_ahead=jump_ahead,
        speculation=speculation,
        drafter=drafter,
        recorder=recorder,
    )
    if watch is not None:
        engine.count_self_test(None)
    return engine, watch


def _passed_self_test(
    device: Device,
    program: Program,
    config: ModelConfig,
    runner: BatchRunner,
    cache: KVCache,
    settings: EngineSettings,
    facts: ModelFacts,
) -> SelfTestWatch | None:
    """Run and return the self-test; None if there is none or it is off. Raises SelfTestError."""
    if (file := facts.self_test) is None or settings.self_test == "off":
        return None
    watch = SelfTestWatch(
        SelfTest(runner, cache, file),
        Locator(device, program, config, file, same_bits=facts.same_bits),
        Subject(device=device.name, identity=facts.identity, kernels=facts.kernels),
        hourly=settings.self_test == "hourly",
    )
    watch.run()
    return watch


def _check_pipeline_depth(runner: BatchRunner, settings: EngineSettings) -> None:
    if settings.pipeline_depth and not runner.buckets.can_run_ahead:
        raise ArtifactError(
            f"the VMFB has no decode loops for its largest decodes, which `--pipeline-depth "
            f"{settings.pipeline_depth}` needs; rebuild it with `shortfin-llm build --decode-loop-sizes` and "
            "the sizes of `--decode-batch-sizes`, or leave that option out"
        )


def _warm_up(
    runner: BatchRunner,
    config: ModelConfig,
    facts: ModelFacts,
    on_warm_up: OnProgress,
) -> None:
    warmed_up = warm_up(runner, on_warm_up)
    for entry in warmed_up:
        check_results(entry, config, facts.tokenizer_vocab_size)
    logger.info(
        "warmed up %d entries; the KV cache, results and workspace take %.1f MiB",
        len(warmed_up),
        runner.num_bytes / 2**20,
    )


def _draft_program(
    device: Device, settings: EngineSettings, facts: ModelFacts, max_running: int
) -> DraftProgram | None:
    if facts.draft_model is None:
        return None
    max_tokens, vocab_size = settings.speculative_tokens, facts.tokenizer_vocab_size
    return load_draft_program(
        device,
        facts.draft_model,
        vocab_size,
        max_running,
        max_tokens,
        static_threshold=settings.static_threshold,
    )


def _num_pages(
    device: Device,
    program: Program,
    config: ModelConfig,
    settings: EngineSettings,
    facts: ModelFacts,
    max_running: int,
    tokens_ahead: int | None,
    draft: DraftProgram | None,
) -> int:
    """Return the number of pages of the cache. Raises ArtifactError for too few."""
    recorded = config.paged_kv_cache.device_block_count
    chosen = settings.pages or facts.pages or ("auto" if settings.is_on_gpu else recorded)
    if chosen == "auto":
        return _pages_that_fit(device, program, config, max_running, tokens_ahead, draft) or recorded
    if chosen < 2:
        raise ArtifactError("the page table needs at least 2 pages: the first is scratch; raise `--pages`")
    return chosen


def _pages_that_fit(
    device: Device,
    program: Program,
    config: ModelConfig,
    max_running: int,
    tokens_ahead: int | None,
    draft: DraftProgram | None,
) -> int | None:
    def taken_beside(num_pages: int) -> int:
        return 0 if draft is None else draft.num_bytes(num_pages * config.stride)

    found = pages_that_fit(device, program, config, max_running, tokens_ahead, taken_beside)
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
