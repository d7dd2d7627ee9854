"""Assembles speculation: its options, and a draft model next to the main model, or its draft layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.components.engine.draft_layer import DraftLayer
from shortfin_apps.llm.components.engine.draft_model import CATCH_UP_TOKENS, DraftModel
from shortfin_apps.llm.components.engine.drafter import DraftOptions
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.invocation.invoker import owned_bytes
from shortfin_apps.llm.components.invocation.padding_runs import decode_s, shape_s, warm_up
from shortfin_apps.llm.components.invocation.page_count import page_table_bytes, window_page_count
from shortfin_apps.llm.components.invocation.page_table import make_page_cache, make_runner
from shortfin_apps.llm.components.invocation.slot_tables import table_bytes
from shortfin_apps.llm.components.invocation.static_threshold import with_static_threshold
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.runtime.check import check_program
from shortfin_apps.llm.components.runtime.device import Device, Program
from shortfin_apps.llm.components.speculation.options import (
    CPU_ROW_COST,
    GPU_ROW_COST,
    SpeculationOptions,
)
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.engine_settings import EngineSettings

logger = logging.getLogger(__name__)

TIMED_DECODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFiles:
    """The files of a draft model, which must have the same token IDs as the main model.

    `round_cost`: time of a decode of the draft model relative to one of the main model; None to measure it.
    """

    config: ModelConfig
    vmfb: Path
    parameters: Sequence[Path]
    round_cost: float | None = None


def speculation_options(
    config: ModelConfig,
    buckets: Buckets,
    settings: EngineSettings,
    *,
    has_draft_model: bool,
    on_gpu: bool,
) -> SpeculationOptions | None:
    """Return the speculation options; None if no tokens are proposed.

    Raises ArtifactError if the settings ask for proposed tokens and the model does not support these.
    """
    looks_up = settings.speculative == "ngram"
    if settings.speculative == "off" and not has_draft_model:
        return None
    flag = "--speculative-model" if settings.speculative == "off" else "--speculative"
    if settings.speculative == "mtp":
        _check_draft_layer(buckets, has_draft_model=has_draft_model)
    if problem := _problem_with_proposals(config, buckets, flag):
        raise ArtifactError(problem)
    if (buckets.most_drafts or has_draft_model) and settings.speculative_tokens >= HIDDEN_PER_SLOT:
        raise ArtifactError(
            f"`--speculative-tokens` is at most {HIDDEN_PER_SLOT - 1} with a draft model, and for a model "
            "with a draft layer (or build that with `--no-draft-layer`); lower it"
        )
    return SpeculationOptions(
        max_tokens=settings.speculative_tokens if looks_up else 0,
        row_cost=GPU_ROW_COST if on_gpu else CPU_ROW_COST,
    )


def _check_draft_layer(buckets: Buckets, *, has_draft_model: bool) -> None:
    if not buckets.most_drafts:
        raise ArtifactError(
            "the model has no draft layer, which `--speculative mtp` needs; rebuild it with `shortfin-llm "
            "build` from a source that has one, or with an EAGLE-3 head (`--speculative-model`), or leave "
            "that option out"
        )
    if has_draft_model:
        raise ArtifactError(
            "`--speculative mtp` drafts with the model's own layer, and `--speculative-model` with a model: "
            "give one of them"
        )


def _problem_with_proposals(config: ModelConfig, buckets: Buckets, flag: str) -> str | None:
    """Return why the model does not support proposed tokens, which `flag` needs; None if it does."""
    if not buckets.has_packed_extend:
        return (
            f"the VMFB has no packed `extend` entry, which `{flag}` needs; rebuild it with "
            "`shortfin-llm build`, or leave that option out"
        )
    if "state" in config.pools and not buckets.takes_followers:
        return (
            "the VMFB cannot bring states of the model's layers back to before a rejected token, which "
            f"`{flag}` needs; rebuild it with `shortfin-llm build`, or leave that option out"
        )
    return None


@dataclass(frozen=True, slots=True)
class DraftProgram:
    """A draft model whose program is loaded and whose pages are not allocated yet."""

    config: ModelConfig
    program: Program
    round_cost: float | None  # None: to be measured
    max_running: int
    max_tokens: int  # drafted per request at once

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages, with the scratch page, for requests of `num_tokens` tokens in total."""
        context_pages = -(-self.config.max_seq_len // self.config.stride)
        return 1 + min(-(-num_tokens // self.config.stride), self.max_running * context_pages)

    def num_window_pages(self, num_pages: int) -> int:
        return window_page_count(self.config, num_pages, CATCH_UP_TOKENS + self.max_tokens)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the page table for `num_tokens`, and of the program's own buffers."""
        num_pages, entries = self.num_pages(num_tokens), self.program.entries
        slabs = page_table_bytes(self.config, num_pages, self.num_window_pages(num_pages))
        return slabs + owned_bytes(entries) + table_bytes(entries, self.max_running)


def load_draft_program(
    device: Device,
    files: DraftFiles,
    vocab_size: int | None,
    max_running: int,
    max_tokens: int,
    *,
    static_threshold: int | None = None,
) -> DraftProgram:
    """Load a draft model next to the main model. Raises ArtifactError naming the draft model."""
    try:
        config = files.config
        program = device.load_program(files.vmfb, files.parameters, config.module_name)
        check_program(program, config, vocab_size)
        program = with_static_threshold(program, static_threshold)
        buckets = Buckets(program.entries, config.stride, has_prefill_position=config.has_prefill_position)
        if "state" in config.pools:
            raise ArtifactError(
                "the model has layers that keep a state, which a draft model cannot bring back to before a "
                "rejected token; leave out `--speculative-model`"
            )
        if problem := _problem_with_proposals(config, buckets, "--speculative-model"):
            raise ArtifactError(problem)
        if not (buckets.can_run_ahead and buckets.draws_rows):
            sizes = ",".join(map(str, config.decode_batch_sizes))
            raise ArtifactError(
                f"the VMFB cannot draw tokens on the device; build it with `--decode-loop-sizes {sizes}`, or "
                "give `--speculative-model` its source, which `serve` builds so"
            )
    except ArtifactError as error:
        raise ArtifactError(f"the draft model: {error}") from error
    return DraftProgram(config, program, files.round_cost, max_running, max_tokens)


def make_draft_model(
    device: Device,
    draft: DraftProgram,
    model: BatchRunner,
    num_tokens: int,
    prefix_cache: PrefixCache,
) -> DraftModel:
    """Allocate pages for as many tokens as the main model has (`num_tokens`); warm up the draft model.

    Callers must warm up `model`, the main model, first: the cost of a draft round is measured relative to a
    decode of `model`.
    """
    config, num_pages = draft.config, draft.num_pages(num_tokens)
    num_window_pages = draft.num_window_pages(num_pages)
    runner = make_runner(device, draft.program, config, num_pages, num_window_pages)
    runner.slots.resize(
        draft.max_running
    )  # if it has a draft layer of its own, its entries keep hidden states
    warm_up(runner)
    cost = draft.round_cost
    if cost is None:
        cost = decode_s(runner, TIMED_DECODES) / decode_s(model, TIMED_DECODES)
    logger.info(
        "draft model: a decode takes %.0f %% of the model's time; its KV cache, results and workspace take "
        "%.1f MiB",
        100 * cost,
        runner.num_bytes / 2**20,
    )
    options = DraftOptions(
        max_tokens=draft.max_tokens,
        max_seq_len=config.max_seq_len,
        round_cost=cost,
    )
    cache = make_page_cache(config, prefix_cache, num_pages, num_window_pages)
    return DraftModel(runner, cache, options, model.slots)


def make_draft_layer(
    model: BatchRunner, cache: KVCache, config: ModelConfig, settings: EngineSettings
) -> DraftLayer:
    """Return the drafter of `--speculative mtp`. Callers must warm up `model` first."""
    round_s = shape_s(model, model.buckets.draft(1), TIMED_DECODES)
    cost = round_s / decode_s(model, TIMED_DECODES)
    logger.info("draft layer: a round takes %.0f %% of a decode's time", 100 * cost)
    options = DraftOptions(
        max_tokens=settings.speculative_tokens,
        max_seq_len=config.max_seq_len,
        round_cost=cost,
    )
    return DraftLayer(model, cache, options)
