"""An engine over the fake device, put together as `loading.py` does with a real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from shortfin_apps.llm.components.batching import make_mode
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.draft_layer import DraftLayer
from shortfin_apps.llm.components.engine.draft_model import DraftModel
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftOptions
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.mask_costs import MaskCosts
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.page_count import least_window_pages
from shortfin_apps.llm.components.invocation.slot_tables import SlotTables
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.kvcache import PrefixCache, WindowOptions, make_cache
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.request.messages import (
    DEFAULT_TERMS,
    Delta,
    FinishReason,
    GenerateCall,
    Terms,
)
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT
from shortfin_apps.llm.contract.config import ModelConfig
from tests.components.fake_device import (
    FakeBuffer,
    FakeDevice,
    FakeProgram,
    Faults,
    fake_config,
    page_table_of,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]


def call(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    salt: str | None = None,
    terms: Terms = DEFAULT_TERMS,
    **params: Any,
) -> GenerateCall:
    params = {"temperature": 0.0, **params}
    return GenerateCall(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        cache_salt=salt,
        terms=terms,
    )


@dataclass
class Rig:
    engine: Engine
    scheduler: Scheduler
    cache: KVCache
    runner: BatchRunner
    program: FakeProgram
    device: FakeDevice
    slab: FakeBuffer
    draft: FakeDraft | None = None
    static_threshold: int | None = None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, Delta] = field(default_factory=dict)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.last, "a request was answered twice"
            self.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.last[delta.request_id] = delta
        for cache in self.caches:
            cache.check_integrity()

    def step(self) -> None:
        self.take(self.engine.step())

    def run(self, limit: int = 10_000) -> None:
        while self.engine.has_work:
            self.step()
            limit -= 1
            assert limit, "the engine makes no progress"

    def reason(self, request_id: str) -> FinishReason | None:
        return self.last[request_id].finish_reason

    def all_pages_back(self) -> bool:
        """Of the model and, once it has been told that requests have ended, of the draft model."""
        if self.draft is not None:
            self.draft.model.forget_ended()
        for cache in self.caches:
            cache.flush()
        usages = [usage for cache in self.caches for usage in (cache.usage(), cache.window_usage())]
        return all(usage.free == usage.total for usage in usages if usage is not None)

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache] if self.draft is None else [self.cache, self.draft.cache]


@dataclass
class FakeDraft:
    """A draft model beside the model of a Rig."""

    model: DraftModel
    program: FakeProgram
    cache: KVCache


def make_draft(
    config: ModelConfig,
    *,
    repeats: float = 0.0,
    errs: float = 0.0,
    max_tokens: int = 4,
    round_cost: float = 0.0,
    catch_up_tokens: int = 16,
    prefix_cache: PrefixCache = "trie",
    loop_sizes: tuple[int, ...] = (1, 2, 4, 8),
) -> FakeDraft:
    """It drafts what the model of `repeats` chooses, but for a share of `errs`."""
    program = FakeProgram(config, Faults(), extend_rank=1)
    program.repeats, program.errs = repeats, errs
    program.loop_sizes, program.sample_sizes = loop_sizes, (2, 4)
    device = FakeDevice(program)
    num_pages, num_window_pages, window = config.paged_kv_cache.device_block_count, 0, None
    if config.window_tokens is not None:
        num_window_pages = least_window_pages(config, catch_up_tokens + max_tokens)
        window = WindowOptions(tokens=config.window_tokens, num_pages=num_window_pages)
    cache = make_cache(prefix_cache, num_pages, config.stride, window)
    page_table = page_table_of(device, config, num_pages, num_window_pages)
    runner = BatchRunner(device, program, config, page_table=page_table)
    options = DraftOptions(
        max_tokens=max_tokens,
        max_seq_len=config.max_seq_len,
        round_cost=round_cost,
    )
    tables = SlotTables(device, program.entries)  # make_rig replaces them by the model's
    return FakeDraft(DraftModel(runner, cache, options, tables, catch_up_tokens), program, cache)


def make_rig(
    config: ModelConfig | None = None,
    *,
    prefix_cache: PrefixCache = "trie",
    chunk_tokens: int = 8,
    max_running: int = 8,
    eos: frozenset[int] = frozenset(),
    mode: str = "default",
    token_budget: int | None = None,
    extend_rank: int = 1,
    extend_lengths: tuple[int, ...] = (),
    static_lengths: tuple[int, ...] = (),
    loop_sizes: tuple[int, ...] = (),
    sample_sizes: tuple[int, ...] = (),
    adjusted_sample_sizes: tuple[int, ...] = (),
    logprob_sizes: tuple[int, ...] = (),
    static_threshold: int | None = None,
    logits_result: bool = True,
    reads_masked: bool = False,
    scheduling: dict[str, Any] | None = None,
    strict: bool = True,
    depth: int = 1,
    jump_ahead: bool = True,
    speculation: SpeculationOptions | None = None,
    draft: FakeDraft | None = None,
    drafts: float | None = None,
    repeats: float = 0.0,
    more_window_pages: int = 0,
    recorder: FlightRecorder | None = None,
    mask_costs: MaskCosts | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rig:
    """With `drafts`, the model has a draft layer, which errs as often."""
    config = config or fake_config()
    program = FakeProgram(config, Faults(), static_lengths, logits_result, extend_rank, extend_lengths)
    program.reads_masked = reads_masked
    program.repeats = repeats
    program.drafts, program.draft_errs = drafts is not None, drafts or 0.0
    program.loop_sizes = loop_sizes
    program.sample_sizes = sample_sizes
    program.adjusted_sample_sizes = adjusted_sample_sizes
    program.logprob_sizes = logprob_sizes
    device = FakeDevice(program)
    used = with_static_threshold(program, static_threshold)
    if token_budget is None and mode == "extend-attention":
        token_budget = 16
    chunk = chunk_tokens if config.has_prefill_position else None
    options = BatchSettings(
        batch_mode=cast(BatchModeName, mode), chunk_tokens=chunk, token_budget=token_budget
    )
    buckets = Buckets(used.entries, config.stride, has_prefill_position=config.has_prefill_position)
    batch_mode = make_mode(options, config, buckets)
    num_pages, num_window_pages, window = config.paged_kv_cache.device_block_count, 0, None
    if config.window_tokens is not None:
        ahead = batch_mode.tokens_ahead(config.stride)
        assert ahead is not None
        num_window_pages = least_window_pages(config, ahead) + more_window_pages
        window = WindowOptions(
            tokens=config.window_tokens, num_pages=num_window_pages, holds_states="state" in config.pools
        )
    cache = make_cache(prefix_cache, num_pages, config.stride, window)
    page_table = page_table_of(device, config, num_pages, num_window_pages)
    runner = BatchRunner(device, used, config, page_table=page_table, recorder=recorder)
    scheduler = Scheduler(cache, batch_mode, max_running, **(scheduling or {}))
    drafter: Drafter | None = None
    if draft is not None:
        drafter = draft.model
        draft.model._tables = runner.slots
        draft.program.in_flight = program.in_flight  # both programs run on one device, in order
    if drafts is not None:
        drafter = DraftLayer(
            runner,
            cache,
            DraftOptions(max_tokens=HIDDEN_PER_SLOT - 1, max_seq_len=config.max_seq_len, round_cost=0),
        )
    engine = Engine(
        scheduler=scheduler,
        cache=cache,
        runner=runner,
        max_seq_len=config.max_seq_len,
        eos_token_ids=eos,
        strict=strict,
        depth=depth,
        jump_ahead=jump_ahead,
        speculation=speculation,
        drafter=drafter,
        recorder=recorder,
        mask_costs=mask_costs,
        clock=clock,
    )
    return Rig(engine, scheduler, cache, runner, program, device, page_table[0], draft, static_threshold)
